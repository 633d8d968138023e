//! Confirmation of acts that can't be undone.

use super::CliError;
use super::printer::Printer;

/// An act that can't be undone, or that only an owner can undo for a limited time.
pub(super) struct IrreversibleAct<'a> {
    /// Sentences that describe the act's consequences.
    pub(super) consequences: Vec<String>,
    /// Word that a person has to type as confirmation. Usually it is the name or id of the object
    /// that the act affects.
    pub(super) name: &'a str,
}

impl IrreversibleAct<'_> {
    /// Prints the consequences, and asks for confirmation. Succeeds if `yes` is true or a person
    /// types the name. Without `yes` and without a terminal it fails, because nobody can be asked.
    pub(super) fn confirm(&self, yes: bool, printer: &mut Printer) -> Result<(), CliError> {
        for sentence in &self.consequences {
            printer.note(sentence);
        }
        if yes {
            return Ok(());
        }
        let answer = printer.ask(&format!("Type {} again to go on:", self.name));
        self.judge(answer.as_deref())
    }

    fn judge(&self, answer: Option<&str>) -> Result<(), CliError> {
        let name = self.name;
        match answer {
            Some(typed) if typed == name => Ok(()),
            Some(typed) => Err(CliError::Usage(format!(
                "nothing was done: `{typed}` was typed instead of `{name}`"
            ))),
            None => Err(CliError::Usage(format!(
                "nothing was done: {} There is no terminal to ask on: say --yes to do it",
                self.consequences.last().map(String::as_str).unwrap_or_default()
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_exact_name_confirms_the_act() {
        let act = IrreversibleAct { consequences: vec!["It ends prod.".into()], name: "prod" };
        assert!(act.judge(Some("prod")).is_ok());
        for answer in [Some(""), Some("yes"), Some("prod-2"), Some("PROD"), None] {
            let refused = act.judge(answer).unwrap_err();
            assert_eq!(refused.exit_code(), 2, "{answer:?}");
            assert!(refused.to_string().starts_with("nothing was done"), "{refused}");
        }
        let unasked = act.judge(None).unwrap_err().to_string();
        assert!(unasked.contains("It ends prod.") && unasked.contains("--yes"), "{unasked}");
    }
}
