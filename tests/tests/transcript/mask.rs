//! Masks values in outputs that differ between any two clusters.

/// Labels of numbers and ids that are masked.
const LABELS: [&str; 15] = [
    "\"raft_term\":",
    "\"RaftTerm\" : ",
    "\"raftTerm\":",
    "\"cluster_id\":",
    "\"member_id\":",
    "\"ID\":",
    "\"ClusterID\" : ",
    "\"MemberID\" : ",
    "\"leader\":",
    "\"raftIndex\":",
    "\"raftAppliedIndex\":",
    "\"dbSize\":",
    "\"dbSizeInUse\":",
    "\"ttl\":",
    "\"TTL\" : ",
];
/// Minimum length of an id in digits. Ids have 16 hexadecimal or up to 20 decimal digits, and
/// shorter ids are rare.
const ID_DIGITS: usize = 13;
const TIME_UNITS: [&str; 3] = ["ms", "µs", "s"];

pub(crate) fn masked(text: &str, address: &str) -> String {
    let text = text.replace(address, "HOST");
    let mut text: String =
        text.split_inclusive('\n').map(|line| without_padding(without_log(line))).collect();
    for label in LABELS {
        text = mask_after_label(&text, label);
    }
    mask_words(&text)
}

/// Returns a line without the client's own log, except for the server's error in it.
fn without_log(line: &str) -> &str {
    // A line of the oldest etcdctl's own log begins with a timestamp, which is cut off.
    if let Some(at) = line.find(" | pkg/") {
        return &line[at..];
    }
    let is_log = line.starts_with("{\"level\":") || line.contains("Z\tinfo\t");
    match (is_log, line.find("\"error\":")) {
        (false, _) => line,
        (true, Some(at)) => &line[at..],
        (true, None) => "",
    }
}

/// Removes from a table's line the padding that depends on the widths of ids and times.
fn without_padding(line: &str) -> String {
    let is_table = line.starts_with(['┌', '├', '└', '│', '+', '|']);
    let mut before = None;
    let fills = |c, before| is_table && "─- ".contains(c) && before == Some(c);
    line.chars().filter(|&c| !fills(c, before.replace(c))).collect()
}

/// Masks the number or id after each label.
fn mask_after_label(text: &str, label: &str) -> String {
    let mut parts = text.split(label);
    let mut masked = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let end = part.find(|c: char| !c.is_alphanumeric() && c != '"').unwrap_or(part.len());
        masked.push_str(label);
        masked.push('~');
        masked.push_str(&part[end..]);
    }
    masked
}

/// Masks ids and times.
fn mask_words(text: &str) -> String {
    let mut masked = String::new();
    let mut rest = text;
    while !rest.is_empty() {
        let is_word = |c: char| c.is_alphanumeric() || c == '.';
        let end = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
        // A dot at the end of a word may be the end of a sentence, so it is no part of the word.
        let word = rest[..end].trim_end_matches('.').len();
        masked.push_str(match &rest[..word] {
            id if id.len() >= ID_DIGITS && id.bytes().all(|b| b.is_ascii_hexdigit()) => "ID",
            time if is_time(time) => "TIME",
            word => word,
        });
        let next = end + rest[end..].find(is_word).unwrap_or(rest.len() - end);
        masked.push_str(&rest[word..next]);
        rest = &rest[next..];
    }
    masked
}

fn is_time(word: &str) -> bool {
    let number = TIME_UNITS.iter().find_map(|unit| word.strip_suffix(unit));
    number.is_some_and(|number| number.parse::<f64>().is_ok())
}

#[test]
fn ids_and_times_are_masked_and_nothing_else() {
    let text = "{\"ID\":12428976124636271536,\"raft_term\":2},k1 abc [8e9e05c52164694d] http://127.1.2.3:1";
    let expected = "{\"ID\":~,\"raft_term\":~},k1 abc [ID] http://HOST:1";
    assert_eq!(masked(text, "127.1.2.3"), expected);
    assert_eq!(masked("took = 1.5ms, 3s. 7 s. 1.5", "x"), "took = TIME, TIME. 7 s. 1.5");
    let log = "{\"level\":\"warn\",\"ts\":1,\"error\":\"code = 3\"}\nError: so\n{\"level\":1}\n1Z\tinfo\tx\n";
    let log = format!("{log}2026 W | pkg/flags\n");
    assert_eq!(masked(&log, "x"), "\"error\":\"code = 3\"}\nError: so\n | pkg/flags\n");
    let table = "┌────┬──┐\n│  a │ b│\n+---+\na  --\n";
    assert_eq!(masked(table, "x"), "┌─┬─┐\n│ a │ b│\n+-+\na  --\n");
}
