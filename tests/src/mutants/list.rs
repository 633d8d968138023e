//! Parser for the lists of mutants.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};

/// Tests that should find a mutant.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Finder {
    /// The unit tests of a package, or only those whose names contain one of the filters. `None`
    /// means the package of the mutated file.
    Unit { package: Option<String>, filters: Vec<String> },
    /// The simulation, with this number of histories.
    Sim { histories: u64 },
    /// An integration test: its package, its name, and filters for its tests.
    Test { package: String, name: String, filters: Vec<String> },
}

/// A small bug, as a replacement of a piece of source text.
#[derive(Clone, Debug)]
pub struct Mutant {
    /// Number of the mutant, which its replacement text also contains.
    pub id: u32,
    /// Name of the list that contains the mutant: the file name without `.txt`.
    pub list: String,
    /// Description of the bug.
    pub title: String,
    /// Path of the mutated file in the workspace.
    pub file: PathBuf,
    /// Source text that the mutant replaces.
    pub text: String,
    /// Text with the bug.
    pub replacement: String,
    /// Tests that should find the mutant, cheapest first.
    pub finders: Vec<Finder>,
    /// Reason why no test can find the mutant, if its behaviour equals the original's.
    pub equivalent: Option<String>,
}

/// Reads all `*.txt` files of a directory, and returns their mutants by number.
pub fn read_all(directory: &Path) -> Result<Vec<Mutant>> {
    let mut mutants = Vec::new();
    for entry in fs_err::read_dir(directory)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "txt") {
            let text = fs_err::read_to_string(&path)?;
            let list =
                path.file_stem().and_then(|name| name.to_str()).context("a name in UTF-8")?;
            let found = parse(list, &text).with_context(|| format!("in {}", path.display()))?;
            mutants.extend(found);
        }
    }
    mutants.sort_by_key(|mutant| mutant.id);
    for pair in mutants.windows(2) {
        ensure!(pair[0].id != pair[1].id, "there are two mutants {}", pair[0].id);
    }
    Ok(mutants)
}

/// Parses the text of one list of mutants.
pub fn parse(list: &str, text: &str) -> Result<Vec<Mutant>> {
    let mut lines = text.lines().peekable();
    let mut mutants = Vec::new();
    while let Some(line) = lines.next() {
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let Some(head) = line.strip_prefix("mutant ") else { bail!("expected `mutant`: {line}") };
        let (id, title) = head.split_once(": ").with_context(|| format!("no title: {line}"))?;
        let id: u32 = id.parse().with_context(|| format!("no number: {line}"))?;
        let one = parse_one(id, title, &mut lines).with_context(|| format!("mutant {id}"))?;
        mutants.push(Mutant { list: list.to_owned(), ..one });
    }
    Ok(mutants)
}

fn parse_one<'a>(
    id: u32,
    title: &str,
    lines: &mut impl Iterator<Item = &'a str>,
) -> Result<Mutant> {
    let (mut file, mut finders, mut equivalent) = (None, Vec::new(), None);
    loop {
        let line = lines.next().context("it ends too early")?;
        let (keyword, rest) = line.split_once(' ').unwrap_or((line, ""));
        match keyword {
            "in" => file = Some(PathBuf::from(rest)),
            "equivalent" => equivalent = Some(rest.to_owned()),
            "<<<<" => break,
            _ => finders.push(finder(keyword, rest)?),
        }
    }
    let text = read_until(lines, "====")?;
    let replacement = read_until(lines, ">>>>")?;
    ensure!(
        finders.is_empty() == equivalent.is_some(),
        "name what should find it, or else why nothing can"
    );
    ensure!(
        replacement.contains(&format!("mutant({id})")),
        "what replaces the text does not ask mutant({id})"
    );
    let (title, list) = (title.to_owned(), String::new());
    let file = file.context("no `in`")?;
    Ok(Mutant { id, list, title, file, text, replacement, finders, equivalent })
}

fn finder(keyword: &str, rest: &str) -> Result<Finder> {
    let mut words = rest.split_whitespace().map(str::to_owned);
    Ok(match keyword {
        "unit" => Finder::Unit { package: None, filters: words.collect() },
        "unit-of" => {
            let package = Some(words.next().context("unit-of what?")?);
            Finder::Unit { package, filters: words.collect() }
        }
        "sim" => Finder::Sim { histories: rest.parse().context("sim, how many?")? },
        "test" => {
            let package = words.next().context("test of what package?")?;
            let name = words.next().context("what test?")?;
            Finder::Test { package, name, filters: words.collect() }
        }
        _ => bail!("`{keyword}` is none of in, equivalent, unit, unit-of, sim, test, <<<<"),
    })
}

fn read_until<'a>(lines: &mut impl Iterator<Item = &'a str>, end: &str) -> Result<String> {
    let mut kept = Vec::new();
    for line in lines {
        if line == end {
            ensure!(!kept.is_empty(), "nothing before {end}");
            return Ok(kept.join("\n"));
        }
        kept.push(line);
    }
    bail!("{end} is missing")
}

/// Whether a number is selected by `only`: numbers, ranges such as 1301-1318, or patterns in which
/// x is any digit. An empty `only` selects all.
pub fn is_chosen(id: u32, only: &[String]) -> bool {
    let digits = id.to_string();
    let matches = |pattern: &String| {
        let range = pattern.split_once('-');
        let range = range.and_then(|(a, b)| Some(a.parse::<u32>().ok()?..=b.parse().ok()?));
        let same = |(a, b): (char, char)| a == 'x' || a == b;
        range.is_some_and(|range| range.contains(&id))
            || pattern.len() == digits.len() && pattern.chars().zip(digits.chars()).all(same)
    };
    only.is_empty() || only.iter().any(matches)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_gives_file_texts_and_finders_of_a_mutant() {
        let text = "# a comment\n\nmutant 7: one too many\nin node/src/a.rs\nunit a:: b::\nsim 20\n\
            <<<<\n  let x = 1;\n====\n  let x = 1 + u64::from(crate::mutant(7));\n>>>>\n";
        let [mutant] = &parse("a", text).unwrap()[..] else { panic!("one mutant") };
        assert_eq!((mutant.id, &*mutant.title, &*mutant.text), (7, "one too many", "  let x = 1;"));
        assert_eq!(mutant.list, "a");
        let filters = vec!["a::".to_owned(), "b::".to_owned()];
        let unit = Finder::Unit { package: None, filters };
        assert_eq!(mutant.finders, [unit, Finder::Sim { histories: 20 }]);
    }

    #[test]
    fn a_replacement_without_its_own_switch_is_refused() {
        let text = "mutant 7: none\nin a.rs\nunit\n<<<<\na\n====\nb\n>>>>\n";
        assert!(format!("{:#}", parse("a", text).unwrap_err()).contains("does not ask mutant(7)"));
    }

    #[test]
    fn a_mutant_has_finders_or_is_equivalent_but_not_both() {
        let text = |lines| format!("mutant 7: x\nin a.rs\n{lines}<<<<\na\n====\nmutant(7)\n>>>>");
        let known = parse("a", &text("equivalent it is the same\n")).unwrap().remove(0);
        assert_eq!(known.equivalent.as_deref(), Some("it is the same"));
        for neither_or_both in ["", "unit\nequivalent it is the same\n"] {
            let error = format!("{:#}", parse("a", &text(neither_or_both)).unwrap_err());
            assert!(error.contains("name what should find it"), "{error}");
        }
    }

    #[test]
    fn patterns_choose_by_digits_and_ranges_include_both_ends() {
        let only = ["4xx", "12", "509-511"].map(str::to_owned);
        let all = [12, 40, 399, 401, 508, 509, 511, 512];
        let chosen: Vec<u32> = all.into_iter().filter(|id| is_chosen(*id, &only)).collect();
        assert_eq!(chosen, [12, 401, 509, 511]);
    }
}
