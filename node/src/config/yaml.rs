//! Reads the parts of YAML that a configuration needs: single values, lists, mappings, aliases
//! (`*x`) and merged mappings (`<<: *x`). Line numbers are kept for error messages.

use std::collections::{BTreeMap, btree_map};

use saphyr_parser::{Event, Parser, ScalarStyle, ScanError, Span, StrInput};

/// A problem in a file, with its line.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Problem {
    /// Line number, counting from 1.
    pub line: usize,
    pub text: String,
}

/// The first document of a file.
#[derive(Debug, Default)]
pub(super) struct Document {
    pub entries: Vec<Entry>,
    /// Parts that are ignored, as etcd's parser ignores them.
    pub passed_over: Vec<Problem>,
}

/// A key of a mapping, with its value.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub key: String,
    /// Line number of the key.
    pub line: usize,
    pub node: Node,
}

/// A value: single, list or mapping.
#[derive(Clone, Debug)]
pub(super) enum Node {
    /// A single value; `None` for null.
    Scalar(Option<Scalar>),
    List(Vec<Node>),
    Map(Vec<Entry>),
}

/// A single value, as it is written in the file.
#[derive(Clone, Debug)]
pub(super) struct Scalar {
    pub text: String,
    /// Whether the value is written without quotes, so that it may be a number.
    pub is_plain: bool,
}

/// Maximum nesting depth of lists and mappings.
const MAX_DEPTH: usize = 16;
/// Maximum number of values in a document. An alias counts as all the values that it stands for.
const MAX_VALUES: usize = 100_000;
/// Key that merges a mapping: its entries are added to the mapping around it, unless that has the
/// key.
const MERGE: &str = "<<";

/// Parses the first document of a file. A file without a document gives no entries.
///
/// # Errors
/// Fails if the text is not YAML, or if the document is not a mapping.
pub(super) fn parse(text: &str) -> Result<Document, Problem> {
    let parser = Parser::new_from_str(text);
    let mut reader =
        Reader { parser, anchors: BTreeMap::new(), values: 0, passed_over: Vec::new() };
    let mut entries = None;
    loop {
        let (event, line) = reader.next()?;
        match event {
            Event::StreamStart | Event::DocumentEnd | Event::Nothing => {}
            Event::StreamEnd => break,
            Event::DocumentStart(_) if entries.is_some() => {
                reader.pass_over(line, "only the first document counts");
                break;
            }
            Event::DocumentStart(_) => {}
            first => {
                entries = Some(match reader.node(first, line, MAX_DEPTH)? {
                    Node::Map(entries) => entries,
                    Node::Scalar(None) => Vec::new(),
                    Node::Scalar(Some(_)) | Node::List(_) => {
                        return Err(Problem::new(line, "a mapping of keys was expected here"));
                    }
                });
            }
        }
    }
    Ok(Document { entries: entries.unwrap_or_default(), passed_over: reader.passed_over })
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

impl Node {
    /// Returns the number of values in this value, including itself.
    fn values(&self) -> usize {
        1 + match self {
            Self::Scalar(_) => 0,
            Self::List(nodes) => nodes.iter().map(Self::values).sum(),
            Self::Map(entries) => entries.iter().map(|entry| entry.node.values()).sum(),
        }
    }
}

struct Reader<'a> {
    parser: Parser<'a, StrInput<'a>>,
    /// Values that aliases may refer to, by the number that the parser gives their anchor.
    anchors: BTreeMap<usize, Node>,
    values: usize,
    passed_over: Vec<Problem>,
}

impl<'a> Reader<'a> {
    fn next(&mut self) -> Result<(Event<'a>, usize), Problem> {
        match self.parser.next_event() {
            Some(Ok((event, Span { start, .. }))) => Ok((event, start.line())),
            Some(Err(error)) => Err(error.into()),
            None => Ok((Event::StreamEnd, 1)),
        }
    }

    fn pass_over(&mut self, line: usize, text: &str) {
        self.passed_over.push(Problem::new(line, text));
    }

    /// Reads the value that begins with the event `first`. `depth` is the number of further nesting
    /// levels that are allowed.
    fn node(&mut self, first: Event<'a>, line: usize, depth: usize) -> Result<Node, Problem> {
        let nested = depth.checked_sub(1).ok_or_else(|| {
            Problem::new(line, "there are too many lists and mappings inside one another")
        });
        self.count(1, line)?;
        let (anchor, node) = match first {
            Event::MappingStart(anchor, _) => (anchor, Node::Map(self.map(nested?)?)),
            Event::SequenceStart(anchor, _) => (anchor, Node::List(self.list(nested?)?)),
            Event::Alias(anchor) => (0, self.alias(anchor, line)?),
            Event::Scalar(text, style, anchor, _) => (anchor, scalar(text.into_owned(), style)),
            _ => return Err(Problem::new(line, "a value was expected here")),
        };
        // The parser numbers anchors from 1; 0 means none.
        if anchor > 0 {
            self.anchors.insert(anchor, node.clone());
        }
        Ok(node)
    }

    fn alias(&mut self, anchor: usize, line: usize) -> Result<Node, Problem> {
        let node = self.anchors.get(&anchor);
        let values = node.map(Node::values);
        let values =
            values.ok_or_else(|| Problem::new(line, "an alias stands in its own value"))?;
        self.count(values, line)?;
        Ok(self.anchors[&anchor].clone())
    }

    fn count(&mut self, values: usize, line: usize) -> Result<(), Problem> {
        self.values += values;
        if self.values > MAX_VALUES {
            return Err(Problem::new(line, "there are too many values"));
        }
        Ok(())
    }

    /// Reads the rest of a mapping. If a key occurs twice, the last value counts, as in etcd.
    fn map(&mut self, depth: usize) -> Result<Vec<Entry>, Problem> {
        let mut entries: BTreeMap<String, (usize, Node)> = BTreeMap::new();
        let mut order: Vec<String> = Vec::new();
        let mut merged: Vec<Node> = Vec::new();
        loop {
            let (event, line) = self.next()?;
            if event == Event::MappingEnd {
                break;
            }
            let Node::Scalar(key) = self.node(event, line, depth)? else {
                return Err(Problem::new(line, "a single value was expected here"));
            };
            let key = key.map(|key| key.text).unwrap_or_default();
            let (first, value_line) = self.next()?;
            let node = self.node(first, value_line, depth)?;
            if key == MERGE {
                merged.push(node);
                continue;
            }
            match entries.insert(key.clone(), (line, node)) {
                None => order.push(key),
                Some((before, _)) => {
                    let text = format!("{key:?} stands again in line {line}, which counts");
                    self.pass_over(before, &text);
                }
            }
        }
        for node in merged {
            merge(&mut entries, &mut order, node);
        }
        let entry = |key: String| {
            let (line, node) = entries.remove(&key)?;
            Some(Entry { key, line, node })
        };
        Ok(order.into_iter().filter_map(entry).collect())
    }

    fn list(&mut self, depth: usize) -> Result<Vec<Node>, Problem> {
        let mut nodes = Vec::new();
        loop {
            let (event, line) = self.next()?;
            if event == Event::SequenceEnd {
                return Ok(nodes);
            }
            nodes.push(self.node(event, line, depth)?);
        }
    }
}

/// Adds those entries of a mapping, or of each mapping in a list, whose keys are missing.
fn merge(entries: &mut BTreeMap<String, (usize, Node)>, order: &mut Vec<String>, node: Node) {
    match node {
        Node::Map(more) => {
            for Entry { key, line, node } in more {
                if let btree_map::Entry::Vacant(place) = entries.entry(key) {
                    order.push(place.key().clone());
                    place.insert((line, node));
                }
            }
        }
        Node::List(nodes) => {
            nodes.into_iter().for_each(|node| merge(entries, order, node));
        }
        Node::Scalar(_) => {}
    }
}

fn scalar(text: String, style: ScalarStyle) -> Node {
    let is_plain = style == ScalarStyle::Plain;
    let is_null = is_plain && matches!(text.as_str(), "" | "~" | "null" | "Null" | "NULL");
    Node::Scalar((!is_null).then_some(Scalar { text, is_plain }))
}
