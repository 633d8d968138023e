//! Normalization of program outputs for transcripts, and transcripts that combine several programs.

/// The server's error for a request that timed out.
const TIMED_OUT: &str = "etcdserver: request timed out";
/// The client's error for a request that timed out.
const TOO_LATE: &str = "context deadline exceeded";

/// Normalizes the output of a command, and appends its exit code unless that is 0:
///
/// - Words are separated by one space.
/// - Lists are sorted by name instead of by id, since ids are random.
/// - Log lines of the client library are removed.
/// - The server's timeout error is replaced by the client's, because either of them may come first.
pub(crate) fn normalize_output(text: &str, code: Option<i32>) -> String {
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('{'));
    let mut lines: Vec<String> = lines
        .map(|line| match line.split_once("ETCD_INITIAL_CLUSTER=") {
            Some((_, list)) => {
                let mut members: Vec<&str> = list.trim_matches('"').split(',').collect();
                members.sort_unstable();
                format!("ETCD_INITIAL_CLUSTER=\"{}\"", members.join(","))
            }
            None if line == format!("Error: {TIMED_OUT}") => format!("Error: {TOO_LATE}"),
            None => line.split_whitespace().collect::<Vec<_>>().join(" "),
        })
        .collect();
    if lines.iter().all(|line| line.matches(", ").count() == 5) {
        lines.sort_unstable();
    }
    lines.extend(code.map(exit).filter(|line| !line.is_empty()));
    lines.join("\n")
}

/// Whether a command may be repeated after this error. Such an error means that members have not
/// been connected for five seconds, that a learner lags behind, or that there is no leader. A
/// cluster can also lose its leader because the machine is busy.
pub(crate) fn is_retryable(refusal: &str) -> bool {
    let early = [
        "unhealthy cluster",
        "in sync with leader",
        "leader changed",
        "no leader",
        TIMED_OUT,
        TOO_LATE,
    ];
    early.iter().any(|text| refusal.contains(text))
}

/// Formats an exit code as in the transcripts.
fn exit(code: i32) -> String {
    if code == 0 { String::new() } else { format!("exit {code}") }
}

/// Returns the last error in a server's log, without the description of the cluster. If any error
/// says that the member was removed, returns that error.
pub(crate) fn last_error(log: &str) -> String {
    const REMOVED: &str = "member has been permanently removed from the cluster";
    let error = |line: &str| {
        let line: serde_json::Value = serde_json::from_str(line).ok()?;
        Some(line["error"].as_str().filter(|error| !error.is_empty())?.to_owned())
    };
    let errors: Vec<String> = log.lines().rev().filter_map(error).collect();
    if let Some(removed) = errors.iter().find(|error| error.contains(REMOVED)) {
        let word =
            removed.split(REMOVED).next().and_then(|before| before.split_whitespace().last());
        return format!("{} {REMOVED}", word.unwrap_or("the").trim_start_matches('('));
    }
    let why = errors.first().map(String::as_str).unwrap_or_default();
    // Leave out etcd's last resolver error. It contains the two addresses that etcd compared last.
    let why = why.split(", last resolver error").next().unwrap_or_default();
    match (why.find("{ClusterID:"), why.rfind("]}")) {
        (Some(from), Some(to)) => format!("{}{{…}}{}", &why[..from], &why[to + 2..]),
        _ => why.to_owned(),
    }
}

/// Merges transcripts of the same commands. A common line appears once; a differing line begins
/// with the names of the programs that printed it.
pub(crate) fn merged(transcripts: &[(&str, String)]) -> String {
    let mut merged = String::new();
    let mut all: Vec<_> =
        transcripts.iter().map(|(program, text)| (*program, blocks(text).into_iter())).collect();
    loop {
        let next: Vec<_> =
            all.iter_mut().filter_map(|(program, rest)| Some((*program, rest.next()?))).collect();
        let Some((_, (commands, _))) = next.first() else { return merged };
        merged += commands;
        let outputs = next.iter().map(|(_, (_, output))| output.lines().collect::<Vec<_>>());
        let outputs: Vec<Vec<&str>> = outputs.collect();
        let shortest = outputs.iter().map(Vec::len).min().unwrap_or(0);
        let same = |at: &dyn Fn(&Vec<&str>) -> usize| {
            outputs.iter().all(|lines| lines[at(lines)] == outputs[0][at(&outputs[0])])
        };
        let begin = (0..shortest).take_while(|n| same(&|_| *n)).count();
        let end = (1..=shortest - begin).take_while(|n| same(&|lines| lines.len() - n)).count();
        let mut distinct: Vec<(Vec<&str>, &[&str])> = Vec::new();
        for ((program, _), lines) in next.iter().zip(&outputs) {
            let differs = &lines[begin..lines.len() - end];
            match distinct.iter_mut().find(|(_, other)| *other == differs) {
                Some((programs, _)) => programs.push(program),
                None => distinct.push((vec![program], differs)),
            }
        }
        let mut lines: Vec<String> =
            outputs[0][..begin].iter().map(|line| (*line).to_owned()).collect();
        for (programs, differs) in &distinct {
            let program_names =
                if distinct.len() > 1 { programs.join(", ") + ": " } else { String::new() };
            lines.extend(differs.iter().map(|line| format!("{program_names}{line}")));
        }
        let common = &outputs[0][outputs[0].len() - end..];
        lines.extend(common.iter().map(|line| (*line).to_owned()));
        merged.extend(lines.iter().map(|line| format!("{line}\n")));
    }
}

/// Extracts the transcript of one of `programs` from a merged transcript.
pub(crate) fn of_program(program: &str, programs: &[&str], transcript: &str) -> String {
    let split_names = |line: &str| {
        let (program_names, text) = line.split_once(": ")?;
        let program_names: Vec<String> = program_names.split(", ").map(str::to_owned).collect();
        let known = program_names.iter().all(|name| programs.contains(&name.as_str()));
        known.then(|| (program_names, text.to_owned()))
    };
    let mut extracted = String::new();
    for (commands, output) in blocks(transcript) {
        extracted += commands;
        for line in output.split_inclusive('\n') {
            match split_names(line) {
                None => extracted += line,
                Some((program_names, text)) if program_names.iter().any(|name| name == program) => {
                    extracted += &text;
                }
                Some(_) => {}
            }
        }
    }
    extracted
}

/// Splits a transcript into blocks: commands up to the line `---`, and their output up to the next
/// empty line.
fn blocks(transcript: &str) -> Vec<(&str, &str)> {
    const LINE: &str = "\n---\n";
    let mut blocks = Vec::new();
    let mut rest = transcript;
    while let Some(at) = rest.find(LINE) {
        let (commands, after) = rest.split_at(at + LINE.len());
        let end = match after.starts_with('\n') {
            true => 1,
            false => after.find("\n\n").map_or(after.len(), |end| end + 2),
        };
        blocks.push((commands, &after[..end]));
        rest = &after[end..];
    }
    if !rest.is_empty() {
        blocks.push((rest, ""));
    }
    blocks
}

/// Returns the blocks in which two transcripts of the same commands differ. Each block is short
/// enough to be read if only the end of a log is kept.
pub(crate) fn difference(expected: &str, found: &str) -> Option<String> {
    let pairs = blocks(expected).into_iter().zip(blocks(found));
    let differing = pairs.filter(|(expected, found)| expected != found);
    let shown: Vec<String> = differing
        .map(|((commands, expected), (_, found))| {
            format!("{}expected:\n{expected}said:\n{found}", commands.trim_start())
        })
        .collect();
    (expected != found).then(|| shown.join("\n"))
}

#[test]
fn only_differing_blocks_are_shown() {
    let expected = "x\n---\nsame\n\ny\n---\none\n";
    let found = "x\n---\nsame\n\ny\n---\ntwo\n";
    assert_eq!(difference(expected, expected), None);
    let shown = "y\n---\nexpected:\none\nsaid:\ntwo\n";
    assert_eq!(difference(expected, found).as_deref(), Some(shown));
}

#[test]
fn a_merged_transcript_contains_each_programs_output() {
    let begin = "# What\nx\n---\nsame\n\ny\n---\n";
    let end = "last\n\nz\n---\none\n";
    let transcripts = [
        ("a", format!("{begin}first\n{end}")),
        ("b", format!("{begin}first\nmore\n{end}")),
        ("c", format!("{begin}first\nmore\n{end}")),
    ];
    let all = format!("{begin}first\nb, c: more\n{end}");
    assert_eq!(merged(&transcripts), all);
    for (program, text) in &transcripts {
        assert_eq!(of_program(program, &["a", "b", "c"], &all), *text);
    }
}
