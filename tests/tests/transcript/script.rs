//! The script: a command line per line. `"…"` is one word, also an empty one. `<<` before it and what follows
//! ` :: ` is its input, `\n` in it a line's end. `~` before it: it doesn't end by itself. A line `! why`
//! says that of the next one the two programs say different things.

pub(crate) struct Line<'a> {
    pub(crate) text: &'a str,
    pub(crate) args: Vec<String>,
    pub(crate) input: String,
    pub(crate) goes_on: bool,
    pub(crate) differs: Option<&'a str>,
}

pub(crate) fn lines(script: &str) -> impl Iterator<Item = Line<'_>> {
    let mut differs = None;
    script.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).filter_map(
        move |text| {
            if let Some(why) = text.strip_prefix("! ") {
                differs = Some(why);
                return None;
            }
            let (goes_on, rest) = match text.strip_prefix("~ ") {
                Some(rest) => (true, rest),
                None => (false, text),
            };
            let (command, input) =
                match rest.strip_prefix("<< ").and_then(|rest| rest.split_once(" :: ")) {
                    Some((command, input)) => (command, input.replace("\\n", "\n")),
                    None => (rest, String::new()),
                };
            Some(Line { text, args: words(command), input, goes_on, differs: differs.take() })
        },
    )
}

fn words(command: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut rest = command.trim_start();
    while !rest.is_empty() {
        let (word, after) = match rest.strip_prefix('"') {
            Some(quoted) => quoted.split_once('"').expect("a quote ends"),
            None => rest.split_at(rest.find(' ').unwrap_or(rest.len())),
        };
        words.push(word.to_owned());
        rest = after.trim_start();
    }
    words
}

#[test]
fn a_line_is_words_and_what_goes_with_them() {
    let script = "# no line\n\nput \"\" \"a b\" c\n! why not\n<< txn :: a\\nb\\n\n~ watch a\n";
    let [put, txn, watch] = lines(script).collect::<Vec<_>>().try_into().ok().unwrap();
    assert_eq!(put.args, ["put", "", "a b", "c"]);
    assert!(!put.goes_on && put.differs.is_none() && put.input.is_empty());
    assert_eq!(
        (txn.args, &txn.input[..], txn.differs),
        (vec!["txn".to_owned()], "a\nb\n", Some("why not"))
    );
    assert!(watch.goes_on && watch.differs.is_none());
}
