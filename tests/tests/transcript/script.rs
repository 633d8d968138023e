//! Parser for the script. Each line is a command for `etcdctl`, unless its first word is `etcdutl`
//! or `muster-node`.
//!
//! `"…"` is one word, which may be empty. `NAME=value` before the command sets a variable of its
//! environment. Placeholders within words:
//!
//! - `$URL`: the cluster's client URL. `etcdctl` gets it with `--endpoints`, unless the line sets
//!   endpoints itself.
//! - `$OTHER`: the other cluster's client URL.
//! - `$LEASE`: the lease that the cluster granted last.
//! - `$DIR`: a folder of the cluster.
//!
//! Signs before the command, in this order:
//!
//! - `+`: the line is for the newest tools only. The oldest lack one of its flags, and later lines
//!   would wait in vain for its effect.
//! - `~N`: the command doesn't end by itself; it is killed after N lines of output.
//! - `@N`: the command is repeated until it prints N lines.
//! - `&`: the command runs in the background during the following lines. Among these lines, `&N`
//!   waits until the command has printed N lines, and `&` kills the command and compares its
//!   output. A line that repeats the one before it is left out.
//! - `<<`: the text after ` ::` is the input. `\n` in it is a line break, and `>>N` waits for N
//!   lines of output.
//!
//! A line `! why` means that the two programs print different results for the next line, and why.

/// A command line of the script, with the signs before it.
#[derive(Debug)]
pub(crate) struct ScriptLine<'a> {
    pub(crate) text: &'a str,
    pub(crate) newest_only: bool,
    pub(crate) mode: RunMode,
    /// Words of the command; empty if the line is about the background command.
    pub(crate) words: Vec<String>,
    pub(crate) input: Vec<InputStep>,
    pub(crate) differs: Option<&'a str>,
}

/// Condition for the end of a command, or an action on the background command.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum RunMode {
    UntilExit,
    KillAfterLines(usize),
    RepeatUntilLines(usize),
    StartBackground,
    AwaitBackgroundLines(usize),
    EndBackground,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum InputStep {
    AwaitLines(usize),
    Write(String),
}

pub(crate) fn lines(script: &str) -> impl Iterator<Item = ScriptLine<'_>> {
    let mut differs = None;
    script.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).filter_map(
        move |text| {
            if let Some(why) = text.strip_prefix("! ") {
                differs = Some(why);
                return None;
            }
            let newest_only = text.strip_prefix("+ ");
            let (way, rest) = parse_signs(newest_only.unwrap_or(text));
            let (command, input) =
                match rest.strip_prefix("<< ").and_then(|rest| rest.split_once(" ::")) {
                    Some((command, input)) => (command, parse_steps(input.trim_start())),
                    None => (rest, Vec::new()),
                };
            Some(ScriptLine {
                text,
                newest_only: newest_only.is_some(),
                mode: way,
                words: words(command),
                input,
                differs: differs.take(),
            })
        },
    )
}

/// Parses the signs before a command. Returns their meaning and the rest of the line.
fn parse_signs(text: &str) -> (RunMode, &str) {
    let (sign, rest) = text.split_once(' ').unwrap_or((text, ""));
    let number = |digits: &str| digits.parse().expect("a number of lines");
    match (sign.get(..1), sign.get(1..).unwrap_or_default()) {
        (Some("~"), digits) => (RunMode::KillAfterLines(number(digits)), rest),
        (Some("@"), digits) => (RunMode::RepeatUntilLines(number(digits)), rest),
        (Some("&"), "") if rest.is_empty() => (RunMode::EndBackground, ""),
        (Some("&"), "") => (RunMode::StartBackground, rest),
        (Some("&"), digits) => (RunMode::AwaitBackgroundLines(number(digits)), ""),
        _ => (RunMode::UntilExit, text),
    }
}

fn parse_steps(input: &str) -> Vec<InputStep> {
    let mut steps = Vec::new();
    for (n, part) in input.split(">>").enumerate() {
        let digits = part.bytes().take_while(u8::is_ascii_digit).count();
        let text = if n == 0 { part } else { &part[digits..] };
        if n > 0 {
            steps.push(InputStep::AwaitLines(part[..digits].parse().expect("a number of lines")));
        }
        if !text.is_empty() {
            steps.push(InputStep::Write(text.replace("\\n", "\n")));
        }
    }
    steps
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
fn a_script_line_is_parsed_into_words_signs_and_input() {
    let script = "# no line\n\n+ put \"\" \"a b\" c\n! why not\n<< txn :: a\\nb\\n\n~3 watch a\n";
    let [put, txn, watch] = lines(script).collect::<Vec<_>>().try_into().unwrap();
    assert_eq!(put.words, ["put", "", "a b", "c"]);
    assert!(put.newest_only && put.mode == RunMode::UntilExit && put.input.is_empty());
    assert_eq!((put.differs, txn.differs), (None, Some("why not")));
    assert!(!txn.newest_only && txn.words == ["txn"]);
    assert_eq!(txn.input, [InputStep::Write("a\nb\n".to_owned())]);
    assert!(watch.mode == RunMode::KillAfterLines(3) && watch.differs.is_none());
}

#[test]
fn background_commands_and_waits_within_the_input_are_parsed() {
    let script = "& << watch -i :: >>1a 2\\n>>12b\n&4\n@2 get a\n&\n";
    let all: Vec<_> = lines(script).collect();
    let ways: Vec<_> = all.iter().map(|line| line.mode).collect();
    let expected = [
        RunMode::StartBackground,
        RunMode::AwaitBackgroundLines(4),
        RunMode::RepeatUntilLines(2),
        RunMode::EndBackground,
    ];
    assert_eq!(ways, expected);
    let write = |text: &str| InputStep::Write(text.to_owned());
    assert_eq!(
        all[0].input,
        [InputStep::AwaitLines(1), write("a 2\n"), InputStep::AwaitLines(12), write("b")]
    );
    assert!(all[0].words == ["watch", "-i"] && all[1].words.is_empty());
}
