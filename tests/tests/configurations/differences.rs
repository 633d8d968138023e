//! Parser for the tables in `docs/differences.md` with configurations that only one of the programs
//! accepts. A row describes a configuration that contains each text in backticks in the row's first
//! cell. The exceptions are texts after the word "without", which must be missing from the
//! configuration.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};

/// Direction of a difference: which of the two programs refuses the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    RefusedHere,
    RefusedByEtcd,
}

const HEADINGS: [(&str, Direction); 2] = [
    ("### Refused here", Direction::RefusedHere),
    ("### Refused by etcd only", Direction::RefusedByEtcd),
];

struct DifferenceRow {
    direction: Direction,
    line: String,
    parts: Vec<TextCondition>,
}

/// Condition that a configuration contains a text, or doesn't contain it.
struct TextCondition {
    text: String,
    /// Whether `text` must be missing from the configuration instead.
    is_missing: bool,
}

/// Rows of both tables in `docs/differences.md`.
pub(crate) struct Differences(Vec<DifferenceRow>);

impl Differences {
    pub(crate) fn read(text: &str) -> Result<Self> {
        let mut direction = None;
        let mut rows = Vec::new();
        for line in text.lines() {
            if line.starts_with("##") {
                let known = HEADINGS.iter().find(|(heading, _)| *heading == line);
                direction = known.map(|(_, direction)| *direction);
            }
            let (Some(direction), Some(cells)) = (direction, line.strip_prefix("| ")) else {
                continue;
            };
            let first = cells.split(" | ").next().unwrap_or_default();
            let parts = parts(first);
            if !parts.is_empty() {
                rows.push(DifferenceRow { direction, line: line.to_owned(), parts });
            }
        }
        for (heading, direction) in HEADINGS {
            let has_rows = rows.iter().any(|row| row.direction == direction);
            ensure!(has_rows, "docs/differences.md has no rows below {heading:?}");
        }
        Ok(Self(rows))
    }

    /// Returns the number of the row in `docs/differences.md` that describes this configuration.
    pub(crate) fn row(&self, direction: Direction, case: &str) -> Option<usize> {
        self.0.iter().position(|row| {
            let fits = |part: &TextCondition| case.contains(&part.text) != part.is_missing;
            row.direction == direction && row.parts.iter().all(fits)
        })
    }

    /// Returns an error message for each row that no configuration has used.
    pub(crate) fn unused(&self, used: &BTreeSet<usize>) -> Vec<String> {
        let rows = self.0.iter().enumerate().filter(|(n, _)| !used.contains(n));
        rows.map(|(_, row)| {
            format!("docs/differences.md: no configuration of cases.txt shows {}", row.line)
        })
        .collect()
    }
}

fn parts(cell: &str) -> Vec<TextCondition> {
    let pieces: Vec<&str> = cell.split('`').collect();
    let part = |pair: &[&str]| {
        let [before, text] = pair else { return None };
        let is_missing = before.trim_end().ends_with("without");
        Some(TextCondition { text: (*text).to_owned(), is_missing })
    };
    pieces.chunks_exact(2).filter_map(part).collect()
}
