//! As much of YAML as a configuration needs: mappings of single values, lists of these, and one level of
//! mappings below that; with lines, so that what is wrong can be pointed at.

use saphyr_parser::{Event, Parser, ScalarStyle, ScanError, Span, StrInput};

/// What is wrong, and where.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Problem {
    /// From 1.
    pub line: usize,
    pub text: String,
}

/// A key and what it has.
#[derive(Debug)]
pub(super) struct Entry {
    pub key: String,
    /// The key's.
    pub line: usize,
    pub node: Node,
}

/// What a key has.
#[derive(Debug)]
pub(super) enum Node {
    /// One value, as it stands there; `None`: null.
    Scalar(Option<String>),
    List(Vec<String>),
    Map(Vec<Entry>),
}

/// Mappings that may stand inside one another.
const DEPTH: usize = 2;

/// Reads the one document of a file; a file without any has no keys.
///
/// # Errors
/// If it is no YAML, or has more in it than is read here.
pub(super) fn parse(text: &str) -> Result<Vec<Entry>, Problem> {
    let mut reader = Reader(Parser::new_from_str(text));
    let mut entries = None;
    loop {
        let (event, line) = reader.next()?;
        match event {
            Event::StreamStart | Event::DocumentEnd | Event::Nothing => {}
            Event::StreamEnd => return Ok(entries.unwrap_or_default()),
            Event::DocumentStart(_) if entries.is_some() => {
                return Err(Problem::new(line, "there is more than one document"));
            }
            Event::DocumentStart(_) => {}
            first => {
                entries = Some(match reader.node(first, line, DEPTH)? {
                    Node::Map(entries) => entries,
                    Node::Scalar(None) => Vec::new(),
                    Node::Scalar(Some(_)) | Node::List(_) => {
                        return Err(Problem::new(line, "a mapping of keys was expected here"));
                    }
                });
            }
        }
    }
}

impl Problem {
    fn new(line: usize, text: &str) -> Self {
        Self { line, text: text.to_owned() }
    }
}

impl From<ScanError> for Problem {
    fn from(error: ScanError) -> Self {
        Self::new(error.marker().line(), error.info())
    }
}

struct Reader<'a>(Parser<'a, StrInput<'a>>);

impl<'a> Reader<'a> {
    fn next(&mut self) -> Result<(Event<'a>, usize), Problem> {
        match self.0.next_event() {
            Some(Ok((event, Span { start, .. }))) => Ok((event, start.line())),
            Some(Err(error)) => Err(error.into()),
            None => Ok((Event::StreamEnd, 1)),
        }
    }

    /// What `first` begins, with so many mappings inside one another at most.
    fn node(&mut self, first: Event<'a>, line: usize, depth: usize) -> Result<Node, Problem> {
        match first {
            Event::MappingStart(..) if depth > 0 => self.map(depth - 1).map(Node::Map),
            Event::SequenceStart(..) => self.list().map(Node::List),
            scalar => single(scalar, line).map(Node::Scalar),
        }
    }

    fn map(&mut self, depth: usize) -> Result<Vec<Entry>, Problem> {
        let mut entries: Vec<Entry> = Vec::new();
        loop {
            let (event, line) = self.next()?;
            if event == Event::MappingEnd {
                return Ok(entries);
            }
            let key = single(event, line)?.unwrap_or_default();
            if entries.iter().any(|entry| entry.key == key) {
                return Err(Problem { line, text: format!("{key:?} stands here a second time") });
            }
            let (first, value_line) = self.next()?;
            let node = self.node(first, value_line, depth)?;
            entries.push(Entry { key, line, node });
        }
    }

    fn list(&mut self) -> Result<Vec<String>, Problem> {
        let mut values = Vec::new();
        loop {
            let (event, line) = self.next()?;
            if event == Event::SequenceEnd {
                return Ok(values);
            }
            values.push(single(event, line)?.unwrap_or_default());
        }
    }
}

fn single(event: Event<'_>, line: usize) -> Result<Option<String>, Problem> {
    match event {
        Event::Scalar(text, style, ..) => {
            let null = style == ScalarStyle::Plain
                && matches!(&*text, "" | "~" | "null" | "Null" | "NULL");
            Ok((!null).then(|| text.into_owned()))
        }
        Event::Alias(_) => Err(Problem::new(line, "an alias (*) is not supported")),
        _ => Err(Problem::new(line, "a single value was expected here")),
    }
}
