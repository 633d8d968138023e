//! Texts in which a plan is shown to the operator.

use std::fmt;

use super::{EarlyRemovalReason, MemberState, PlanObjection, PlanStep, VoterCounts, Warning};

impl fmt::Display for VoterCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { voters, learners, answering } = self;
        write!(f, "{}", count(*voters, "voter"))?;
        if *learners > 0 {
            write!(f, " and {}", count(*learners, "learner"))?;
        }
        write!(f, ", quorum {}, {} may fail", self.quorum(), self.tolerance())?;
        if answering < voters {
            match self.spare_voters() {
                Some(spare) => write!(f, "; {answering} answer, so {spare} more may fail now")?,
                None => write!(f, "; {answering} answer: there is no quorum")?,
            }
        }
        Ok(())
    }
}

fn count(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

fn list(who: &[String]) -> String {
    who.join(", ")
}

impl fmt::Display for PlanStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Add { is_voter: false } => "the cluster agrees on the new member, as a learner",
            Self::Add { is_voter: true } => "the cluster agrees on the new member, as a voter",
            Self::Start => "somebody starts it, with what `member add` prints",
            Self::CatchUp => "it catches up",
            Self::Promote => "it gets its vote (`member promote`)",
            Self::HandOver => "the member hands its leadership over",
            Self::Remove => "the cluster agrees that the member is gone, for ever; it stops itself",
            Self::Update => "the cluster agrees on the new peer URLs",
            Self::Restart => "somebody restarts the member, with them",
        })
    }
}

impl fmt::Display for PlanObjection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoQuorum(shape) => write!(
                f,
                "{} of {} answer, and {} have to: nothing can be changed before one comes back",
                shape.answering,
                count(shape.voters, "voter"),
                shape.quorum()
            ),
            Self::NotStarted { started, needed, who } => write!(
                f,
                "of the voters afterwards, {started} would have started, and {needed} have to: \
                 start or remove {} first",
                list(who)
            ),
            Self::Unhealthy { healthy, needed, who } => write!(
                f,
                "{healthy} voters answer, and {needed} have to (for 5 s without a break): bring \
                 back, or remove, {} first",
                list(who)
            ),
            Self::TooManyLearners(who) => write!(
                f,
                "{who} is a learner already, and members that run without --max-learners take one \
                 at a time: promote or remove it first"
            ),
            // The wording is the cluster's own, extended by the offending URL and the expected
            // form.
            Self::BadUrl(url) => write!(
                f,
                "etcdserver: given member URLs are invalid: {url:?} is not https://HOST:PORT"
            ),
            Self::UrlTaken(who) => write!(f, "{who} has that peer URL"),
            Self::NameTaken { name, id } => write!(
                f,
                "member {id} is called {name} already, and a name means one member: choose another"
            ),
            Self::NotALearner(who) => write!(f, "{who} votes already"),
            Self::NotInSync(who, MemberState::NotStarted) => write!(f, "{who} has not started"),
            Self::NotInSync(who, MemberState::Silent) => write!(f, "{who} doesn't answer"),
            Self::NotInSync(who, MemberState::Answers { behind: None }) => {
                write!(f, "nobody knows how far {who} is: no leader answers")
            }
            Self::NotInSync(who, MemberState::Answers { behind: Some(behind) }) => {
                write!(f, "{who} is {behind} entries behind: `member promote` waits for it")
            }
            Self::LastVoter => f.write_str("it is the last voter: nobody would be left to agree"),
        }
    }
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::EvenSize(voters) => write!(
                f,
                "{voters} voters tolerate no more failures than {} and need one more to agree: \
                 add or remove another",
                voters - 1
            ),
            Self::LearnerWaits(who) => write!(
                f,
                "{who} is a learner: it has no vote, and helps nobody, until somebody promotes it"
            ),
            Self::CountsAsFailed { spare: Some(spare) } => write!(
                f,
                "a voter that has not started counts as failed: {spare} more may fail until it \
                 serves (without --voter, it costs nothing)"
            ),
            Self::CountsAsFailed { spare: None } => f.write_str(
                "a voter that has not started counts as failed: etcd stands still until it serves, \
                 and muster-node keeps its vote back until then (without --voter, it costs nothing)",
            ),
            Self::RemovesHealthy { silent } => {
                write!(f, "it works, and {} does not: is that the one to remove?", list(silent))
            }
            Self::OneOfTwo => f.write_str(
                "both of two have to live until the removal is agreed on; if either fails in \
                 between, the cluster stands still",
            ),
            Self::LessTolerance(from, to) => {
                write!(f, "{to} may fail afterwards, where {from} may fail now")
            }
            Self::RestartCosts { spare } => {
                f.write_str(
                    "until it is restarted with the new URLs, the others may not reach it: ",
                )?;
                match spare {
                    Some(spare) => write!(f, "{spare} more may fail meanwhile"),
                    None => f.write_str("without it there is no quorum"),
                }
            }
            Self::WithoutTls(url) => {
                write!(f, "the members speak https, and {url} is without: none could reach it there")
            }
            Self::RemovesFirst(why) => write!(f, "the old one goes first: {why}"),
        }
    }
}

impl fmt::Display for EarlyRemovalReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SharedUrl => "the new one is to have its URL",
            Self::Learner => "it is a learner, and there is room for one",
            Self::Failed => {
                "it doesn't answer, and the cluster takes nobody in while too few answer for one \
                 member more"
            }
        })
    }
}
