//! Reads the parts of YAML that a configuration needs: single values, lists, mappings, aliases
//! (`*x`) and merged mappings (`<<: *x`). Line numbers are kept for error messages.

use std::collections::{BTreeMap, btree_map};

use saphyr_parser::{Event, Parser, ScalarStyle, ScanError, Span, StrInput, Tag};

/// A problem in a YAML file, with its line.
#[derive(Debug, PartialEq, Eq)]
pub struct YamlProblem {
    /// Line number, counting from 1.
    pub line: usize,
    pub text: String,
}

/// The first YAML document of a file.
#[derive(Debug, Default)]
pub struct YamlDocument {
    pub entries: Vec<YamlEntry>,
    /// Parts that the parser ignored. etcd's parser ignores them as well.
    pub ignored: Vec<YamlProblem>,
}

/// A key of a mapping, with its value.
#[derive(Clone, Debug)]
pub struct YamlEntry {
    pub key: String,
    /// Line number of the key.
    pub line: usize,
    pub node: YamlNode,
}

/// A value: single, list or mapping.
#[derive(Clone, Debug)]
pub enum YamlNode {
    /// A single value; `None` for null.
    Scalar(Option<Scalar>),
    List(Vec<YamlNode>),
    Map(Vec<YamlEntry>),
}

/// A single value, with its text as written in the file.
#[derive(Clone, Debug)]
pub struct Scalar {
    pub text: String,
    /// Whether the value is written without quotes and without the tag `!!str`. Only such a value
    /// can be a number.
    pub is_plain: bool,
}

/// Maximum nesting depth of lists and mappings.
const MAX_DEPTH: usize = 16;
/// Maximum number of values in a YAML document. An alias counts as many values as the value that it
/// refers to.
const MAX_VALUES: usize = 100_000;
/// Key `<<`, which adds the entries of another mapping to this one. Keys that already exist keep
/// their values.
const MERGE: &str = "<<";
/// Error of the YAML parser about a tab between a key's colon and its value.
const TAB_ERROR: &str = "':' must be followed by a valid YAML whitespace";
/// The tag `!!str` in its long form.
const TEXT_TAG: &str = "tag:yaml.org,2002:str";

/// Parses the first document of a file. An empty file has no entries.
///
/// # Errors
/// Fails if the text is not YAML, or if the document is not a mapping.
pub fn parse(text: &str) -> Result<YamlDocument, YamlProblem> {
    let parser = Parser::new_from_str(text);
    let mut reader =
        YamlReader { parser, anchors: BTreeMap::new(), values: 0, ignored: Vec::new() };
    let mut entries = None;
    loop {
        let (event, line) = reader.next()?;
        match event {
            Event::StreamStart | Event::DocumentEnd | Event::Nothing => {}
            Event::StreamEnd => break,
            Event::DocumentStart(_) if entries.is_some() => {
                reader.ignore(line, "only the first document counts");
                break;
            }
            Event::DocumentStart(_) => {}
            first => {
                entries = Some(match reader.node(first, line, MAX_DEPTH)? {
                    YamlNode::Map(entries) => entries,
                    YamlNode::Scalar(None) => Vec::new(),
                    YamlNode::Scalar(Some(_)) | YamlNode::List(_) => {
                        return Err(YamlProblem::new(line, "a mapping of keys was expected here"));
                    }
                });
            }
        }
    }
    Ok(YamlDocument { entries: entries.unwrap_or_default(), ignored: reader.ignored })
}

impl YamlProblem {
    fn new(line: usize, text: &str) -> Self {
        Self { line, text: text.to_owned() }
    }
}

impl From<ScanError> for YamlProblem {
    fn from(error: ScanError) -> Self {
        let text = match error.info() {
            TAB_ERROR => "a tab stands between ':' and the value: write a space instead",
            other => other,
        };
        Self::new(error.marker().line(), text)
    }
}

impl YamlNode {
    /// Whether the value is null, an empty text, an empty list or an empty mapping.
    pub fn is_empty(&self) -> bool {
        match self {
            Self::Scalar(scalar) => scalar.as_ref().is_none_or(|scalar| scalar.text.is_empty()),
            Self::List(nodes) => nodes.is_empty(),
            Self::Map(entries) => entries.is_empty(),
        }
    }

    /// Returns the number of values in this node, including the node itself.
    fn values(&self) -> usize {
        1 + match self {
            Self::Scalar(_) => 0,
            Self::List(nodes) => nodes.iter().map(Self::values).sum(),
            Self::Map(entries) => entries.iter().map(|entry| entry.node.values()).sum(),
        }
    }
}

struct YamlReader<'a> {
    parser: Parser<'a, StrInput<'a>>,
    /// Nodes that aliases may refer to. Each key is the number that the YAML parser gives to a
    /// node's anchor.
    anchors: BTreeMap<usize, YamlNode>,
    values: usize,
    ignored: Vec<YamlProblem>,
}

impl<'a> YamlReader<'a> {
    fn next(&mut self) -> Result<(Event<'a>, usize), YamlProblem> {
        match self.parser.next_event() {
            Some(Ok((event, Span { start, .. }))) => Ok((event, start.line())),
            Some(Err(error)) => Err(error.into()),
            None => Ok((Event::StreamEnd, 1)),
        }
    }

    fn ignore(&mut self, line: usize, text: &str) {
        self.ignored.push(YamlProblem::new(line, text));
    }

    /// Reads the value that begins with the parser's event `first`. Inside it, lists and mappings
    /// may be nested up to `depth` levels.
    fn node(
        &mut self,
        first: Event<'a>,
        line: usize,
        depth: usize,
    ) -> Result<YamlNode, YamlProblem> {
        let nested = depth.checked_sub(1).ok_or_else(|| {
            YamlProblem::new(line, "there are too many lists and mappings inside one another")
        });
        self.count(1, line)?;
        let (anchor, node) = match first {
            Event::MappingStart(anchor, _) => (anchor, YamlNode::Map(self.map(nested?)?)),
            Event::SequenceStart(anchor, _) => (anchor, YamlNode::List(self.list(nested?)?)),
            Event::Alias(anchor) => (0, self.alias(anchor, line)?),
            Event::Scalar(text, style, anchor, tag) => {
                let is_text = tag.is_some_and(|tag| is_text_tag(&tag));
                let is_plain = style == ScalarStyle::Plain && !is_text;
                (anchor, scalar(text.into_owned(), is_plain))
            }
            _ => return Err(YamlProblem::new(line, "a value was expected here")),
        };
        // The YAML parser numbers anchors from 1; the number 0 means that there is no anchor.
        if anchor > 0 {
            self.anchors.insert(anchor, node.clone());
        }
        Ok(node)
    }

    fn alias(&mut self, anchor: usize, line: usize) -> Result<YamlNode, YamlProblem> {
        let node = self.anchors.get(&anchor);
        let values = node.map(YamlNode::values);
        let values =
            values.ok_or_else(|| YamlProblem::new(line, "an alias stands in its own value"))?;
        self.count(values, line)?;
        Ok(self.anchors[&anchor].clone())
    }

    fn count(&mut self, values: usize, line: usize) -> Result<(), YamlProblem> {
        self.values += values;
        if self.values > MAX_VALUES {
            return Err(YamlProblem::new(line, "there are too many values"));
        }
        Ok(())
    }

    /// Reads a mapping up to its end. If a key occurs twice, the last value counts, as in etcd.
    fn map(&mut self, depth: usize) -> Result<Vec<YamlEntry>, YamlProblem> {
        let mut entries: BTreeMap<String, (usize, YamlNode)> = BTreeMap::new();
        let mut order: Vec<String> = Vec::new();
        let mut merged: Vec<YamlNode> = Vec::new();
        loop {
            let (event, line) = self.next()?;
            if event == Event::MappingEnd {
                break;
            }
            let YamlNode::Scalar(key) = self.node(event, line, depth)? else {
                return Err(YamlProblem::new(line, "a single value was expected here"));
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
                    self.ignore(before, &text);
                }
            }
        }
        for node in merged {
            merge(&mut entries, &mut order, node);
        }
        let entry = |key: String| {
            let (line, node) = entries.remove(&key)?;
            Some(YamlEntry { key, line, node })
        };
        Ok(order.into_iter().filter_map(entry).collect())
    }

    fn list(&mut self, depth: usize) -> Result<Vec<YamlNode>, YamlProblem> {
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

/// Adds the entries of a mapping, or of each mapping in a list, to `entries`. Existing keys keep
/// their values.
fn merge(
    entries: &mut BTreeMap<String, (usize, YamlNode)>,
    order: &mut Vec<String>,
    node: YamlNode,
) {
    match node {
        YamlNode::Map(more) => {
            for YamlEntry { key, line, node } in more {
                if let btree_map::Entry::Vacant(place) = entries.entry(key) {
                    order.push(place.key().clone());
                    place.insert((line, node));
                }
            }
        }
        YamlNode::List(nodes) => {
            nodes.into_iter().for_each(|node| merge(entries, order, node));
        }
        YamlNode::Scalar(_) => {}
    }
}

/// Whether the tag is `!!str`, which makes any value a text.
fn is_text_tag(tag: &Tag) -> bool {
    [tag.handle.as_str(), tag.suffix.as_str()].concat() == TEXT_TAG
}

fn scalar(text: String, is_plain: bool) -> YamlNode {
    let is_null = is_plain && matches!(text.as_str(), "" | "~" | "null" | "Null" | "NULL");
    YamlNode::Scalar((!is_null).then_some(Scalar { text, is_plain }))
}
