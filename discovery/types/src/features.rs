//! Features of an agent that other programs may only rely on once all agents of a cluster have
//! them.
//!
//! During an upgrade, agents of two versions are in one cluster. A newer agent, or an admin's newer
//! tool, must not write what the older agents would misread. So each agent publishes its version
//! and the names of its features ([`AgentBuild`]) in two places:
//! - in the cluster's own store, where the other members' agents read them;
//! - at discovery, in a header of its reports ([`AGENT_BUILD`]), where admins' tools read them.
//!
//! Names decide, not versions: builds between two releases have the same version. An agent that
//! publishes nothing is older than this module. Builds aren't signed, because a feature's presence
//! or absence permits nothing. A forged build can only delay the use of a feature, or bring back
//! the behaviour of agents from before this module.
//!
//! A new feature gets a variant of [`Feature`]. The code that would use it asks [`lacking`] first.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Header of an agent's report with its [`AgentBuild`]. Services of older versions ignore it.
pub const AGENT_BUILD: &str = "muster-agent-build";

/// Maximum length of a version or a feature's name, in bytes.
const MAX_WORD: usize = 64;
/// Maximum number of features that a build may have.
const MAX_FEATURES: usize = 64;

/// A feature that is used only once all agents concerned have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Feature {
    /// The agent reads statements of version 2, which trust additional CAs.
    StatementVersion2,
    /// The agent reads grants of version 2, which are replacement policies.
    GrantVersion2,
    /// The agent repeats its observation of a dead member until the newcomer votes, although the
    /// policy has reached its limit.
    ConfirmedReplacements,
}

impl Feature {
    /// All features, in the order of their versions.
    pub const ALL: [Self; 3] =
        [Self::StatementVersion2, Self::GrantVersion2, Self::ConfirmedReplacements];

    /// Returns the feature's name, which never changes. The ability to read a version of a signed
    /// message is named after the message's kind and that version.
    pub fn name(self) -> &'static str {
        match self {
            Self::StatementVersion2 => "statement-2",
            Self::GrantVersion2 => "grant-2",
            Self::ConfirmedReplacements => "confirmed-replacements",
        }
    }

    /// Returns the first version whose agents publish the feature.
    pub fn since(self) -> &'static str {
        match self {
            Self::StatementVersion2 | Self::GrantVersion2 | Self::ConfirmedReplacements => "0.1.0",
        }
    }

    /// Describes what the feature makes possible.
    pub fn purpose(self) -> &'static str {
        match self {
            Self::StatementVersion2 => "the replacement of the CAs",
            Self::GrantVersion2 => "replacement policies",
            Self::ConfirmedReplacements => "the last replacement that a policy allows",
        }
    }
}

/// An agent's version, and the names of the features that it has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AgentBuild {
    /// Version of the agent's program.
    pub version: String,
    /// Names of the features. Newer agents may have features that this program doesn't know.
    pub features: Vec<String>,
}

/// A text that describes no build.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the text is no version with names of features")]
pub struct NoAgentBuild;

impl AgentBuild {
    /// Returns the build of this program.
    pub fn own() -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            features: Feature::ALL.map(|feature| feature.name().to_owned()).into(),
        }
    }

    /// Returns the build of an agent that publishes no features, from the header `User-Agent` of
    /// its requests. `None` if the header is of another program.
    pub fn of_user_agent(header: &str) -> Option<Self> {
        header.strip_prefix("muster/")?.parse().ok()
    }

    /// Whether the agent has the feature.
    pub fn has(&self, feature: Feature) -> bool {
        self.features.iter().any(|name| name == feature.name())
    }

    /// Whether the texts are short and hold no control characters. They come from other hosts.
    pub fn is_valid(&self) -> bool {
        let mut words = self.features.iter().chain([&self.version]);
        let is_word = |word: &String| {
            let is_plain = word.bytes().all(|byte| byte.is_ascii_graphic());
            !word.is_empty() && word.len() <= MAX_WORD && is_plain
        };
        self.features.len() <= MAX_FEATURES && words.all(is_word)
    }
}

impl fmt::Display for AgentBuild {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.version)?;
        self.features.iter().try_for_each(|feature| write!(f, " {feature}"))
    }
}

impl FromStr for AgentBuild {
    type Err = NoAgentBuild;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut words = text.split(' ').map(str::to_owned);
        let version = words.next().ok_or(NoAgentBuild)?;
        let build = Self { version, features: words.take(MAX_FEATURES + 1).collect() };
        if build.is_valid() { Ok(build) } else { Err(NoAgentBuild) }
    }
}

/// A member's name for people, and the build of its agent; `None` if the agent publishes nothing.
pub type MemberBuild<'a> = (String, Option<&'a AgentBuild>);

/// Returns the members whose agents lack the feature, each with its version.
pub fn lacking(feature: Feature, members: &[MemberBuild<'_>]) -> Vec<String> {
    let lacks = |(_, build): &&MemberBuild<'_>| !build.is_some_and(|build| build.has(feature));
    members.iter().filter(lacks).map(label).collect()
}

/// Describes each feature that an agent of these members lacks. Each line names the agents.
pub fn waiting_features(members: &[MemberBuild<'_>]) -> Vec<String> {
    let line = |feature: Feature| {
        let lacking = lacking(feature, members);
        (!lacking.is_empty()).then(|| {
            let (name, since, purpose) = (feature.name(), feature.since(), feature.purpose());
            format!("{name} (since {since}, for {purpose}) waits for {}", lacking.join(", "))
        })
    };
    Feature::ALL.into_iter().filter_map(line).collect()
}

/// Returns the lowest version of the members' agents. `None` if an agent publishes nothing, or if
/// there are no members.
pub fn lowest_version<'a>(members: &[MemberBuild<'a>]) -> Option<&'a str> {
    let versions = members.iter().map(|(_, build)| build.map(|build| build.version.as_str()));
    let versions: Option<Vec<&str>> = versions.collect();
    versions?.into_iter().min_by_key(|version| version_order(version))
}

/// Returns a key that sorts versions by their numbers.
fn version_order(version: &str) -> Vec<u64> {
    let parts = version.split(['.', '-', '+', '~']);
    parts.map_while(|part| part.parse().ok()).collect()
}

fn label((name, build): &MemberBuild<'_>) -> String {
    match build {
        Some(build) => format!("{name} ({})", build.version),
        None => format!("{name} (no version known)"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jws::JwsType;

    fn build(text: &str) -> AgentBuild {
        text.parse().unwrap()
    }

    fn named<'a>(name: &str, build: &'a AgentBuild) -> MemberBuild<'a> {
        (name.to_owned(), Some(build))
    }

    #[test]
    fn each_version_of_a_signed_record_that_this_program_reads_is_a_feature() {
        let own = AgentBuild::own();
        for (kind, name) in [
            (JwsType::Statement, "statement"),
            (JwsType::Grant, "grant"),
            (JwsType::Record, "record"),
            (JwsType::Document, "document"),
            (JwsType::Admin, "admin"),
            (JwsType::Order, "order"),
            (JwsType::Recovery, "recovery"),
            (JwsType::Service, "service"),
        ] {
            for version in 2..=kind.version().unwrap() {
                let feature = format!("{name}-{version}");
                assert!(own.features.contains(&feature), "add {feature} to Feature");
            }
        }
    }

    #[test]
    fn a_build_survives_the_header_and_junk_is_no_build() {
        let own = AgentBuild::own();
        assert_eq!(build(&own.to_string()), own);
        assert!(Feature::ALL.into_iter().all(|feature| own.has(feature)));
        assert_eq!(AgentBuild::of_user_agent("muster/0.1.0"), Some(build("0.1.0")));
        assert_eq!(AgentBuild::of_user_agent("curl/8.5.0"), None);
        let many = format!("1 {}", ["x"; MAX_FEATURES + 1].join(" "));
        let long = "x".repeat(MAX_WORD + 1);
        for junk in ["", " ", "1  x", "1 x\ny", "1 \u{1b}[2J", many.as_str(), long.as_str()] {
            assert_eq!(junk.parse::<AgentBuild>(), Err(NoAgentBuild), "{junk:?}");
        }
    }

    #[test]
    fn a_feature_waits_for_each_agent_that_lacks_it_or_publishes_nothing() {
        let (new, old) = (AgentBuild::own(), build("0.0.9 statement-2 grant-2"));
        let newer = build(&format!("{new} a-later-feature"));
        assert!(waiting_features(&[named("a", &new), named("b", &newer)]).is_empty());
        let members = [named("a", &new), named("b", &old)];
        assert_eq!(lacking(Feature::GrantVersion2, &members), Vec::<String>::new());
        assert_eq!(
            waiting_features(&members),
            [
                "confirmed-replacements (since 0.1.0, for the last replacement that a policy allows) \
              waits for b (0.0.9)"
            ]
        );
        let lines = waiting_features(&[named("a", &new), ("c".to_owned(), None)]);
        assert_eq!(lines.len(), Feature::ALL.len());
        assert!(lines.iter().all(|line| line.ends_with("waits for c (no version known)")));
    }

    #[test]
    fn the_lowest_version_is_by_numbers_and_unknown_beside_an_unknown_agent() {
        let versions = ["0.10.0", "0.9.2", "1.0.0"].map(build);
        let members: Vec<MemberBuild<'_>> =
            versions.iter().map(|build| named("any", build)).collect();
        assert_eq!(lowest_version(&members), Some("0.9.2"));
        assert_eq!(lowest_version(&[members[0].clone(), ("d".to_owned(), None)]), None);
        assert_eq!(lowest_version(&[]), None);
    }
}
