//! The record of take-overs in the cluster's own store: which member is being restarted, which
//! members an agent runs, and which ones an agent ran until their release.
//!
//! The record is changed by compare-and-swap, so two hosts can't both begin a take-over. A
//! take-over has no time limit. If it is interrupted, the operator runs the command on that host
//! again. Until then, no other host can begin a take-over. If the host is lost, the removal of its
//! member from the cluster ends the take-over.
//!
//! The store may come from a backup of another managed cluster, even of one whose members had equal
//! ids. So the record names the signed list of members for which it was written, and a record for
//! another list counts as empty.

use discovery_types::adoption::Adoption;
use discovery_types::digest::Digest;
use serde::{Deserialize, Serialize};

use crate::cluster::{ClusterApiClient, ClusterError, MemberId, MemberList, StoredValue};
use crate::exit::{ExitError, error_chain};

/// Key of the record of take-overs in the cluster's own store.
pub(crate) const KEY: &str = "muster/v1/take-over";
/// Version of the record's format.
const VERSION: u32 = 1;
/// Maximum number of attempts to change the record of take-overs, if other hosts change it at the
/// same time.
const TRIES: usize = 5;

/// Value of the key [`KEY`]: the member that is being restarted, and the members that agents run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TakeOverRecord {
    version: u32,
    /// Hash of the signed list of members for which the record was written. Missing in records of
    /// older agents.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    list: Option<Digest>,
    /// The member that is being restarted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    at_work: Option<RestartingMember>,
    /// Ids of the members that an agent runs, in hexadecimal.
    #[serde(default)]
    managed: Vec<String>,
    /// Ids of the members that an agent has released, in hexadecimal. An older agent doesn't know
    /// this field, and loses it when it changes the record.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    released: Vec<String>,
}

/// A member that is being restarted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct RestartingMember {
    id: String,
    name: String,
}

impl TakeOverRecord {
    fn empty(list: Digest) -> Self {
        Self { version: VERSION, list: Some(list), ..Self::default() }
    }

    /// Returns this record if it was written for the signed list of members with the hash `list`.
    /// Otherwise returns an empty record.
    fn for_list(self, list: Digest) -> Self {
        match self.list {
            Some(other) if other != list => Self::empty(list),
            _ => Self { list: Some(list), ..self },
        }
    }

    /// Notes that the member is being restarted. `members` are the ids of all members.
    ///
    /// # Errors
    /// Returns the name of another member that is being restarted.
    fn begin(&mut self, id: MemberId, name: &str, members: &[MemberId]) -> Result<(), String> {
        let is_member = |id: &str| members.iter().any(|member| member.to_string() == id);
        match &self.at_work {
            Some(other) if other.id != id.to_string() && is_member(&other.id) => {
                Err(other.name.clone())
            }
            _ => {
                let id = id.to_string();
                self.at_work = Some(RestartingMember { id, name: name.to_owned() });
                Ok(())
            }
        }
    }

    /// Whether this member is being restarted.
    pub(crate) fn is_restarting(&self, id: MemberId) -> bool {
        self.at_work.as_ref().is_some_and(|member| member.id == id.to_string())
    }

    /// Notes that the member runs again, and whether an agent runs it.
    fn end(&mut self, id: MemberId, is_managed: bool) {
        let id = id.to_string();
        self.at_work = self.at_work.take().filter(|member| member.id != id);
        self.managed.retain(|member| *member != id);
        self.released.retain(|member| *member != id);
        if is_managed {
            self.managed.push(id);
            self.managed.sort_unstable();
        }
    }

    /// Notes that the member runs again, without the agent that ran it.
    fn release(&mut self, id: MemberId) {
        self.end(id, false);
        self.released.push(id.to_string());
        self.released.sort_unstable();
    }

    /// Returns ids and names of the members in the owner's signed list that are still in the
    /// cluster, and that no agent has taken over. A released member counts as taken over: it keeps
    /// the CAs that its agent gave it.
    pub(crate) fn unmanaged<'a>(
        &self,
        adoption: &'a Adoption,
        members: &MemberList,
    ) -> Vec<(MemberId, &'a str)> {
        let signed = adoption.members.iter().map(|it| (MemberId(it.id.get()), it.name.as_str()));
        let is_unmanaged = |id: MemberId| {
            let text = id.to_string();
            let is_taken_over = self.managed.contains(&text) || self.released.contains(&text);
            members.of_id(id).is_some() && !is_taken_over
        };
        signed.filter(|(id, _)| is_unmanaged(*id)).collect()
    }
}

/// Reads the record for the signed list of members with this hash. Returns an empty record if the
/// store has none for that list.
pub(crate) async fn read(
    cluster: &ClusterApiClient,
    list: Digest,
) -> Result<(StoredValue, TakeOverRecord), ExitError> {
    let stored = cluster.read_key(KEY).await.map_err(store_error)?;
    let Some(bytes) = &stored.value else { return Ok((stored, TakeOverRecord::empty(list))) };
    let bad = |what: String| {
        ExitError::DoNotRestart(format!(
            "the key {KEY} in the cluster's store can't be read ({what}): if no member is being \
             taken over or released, delete it with etcdctl del {KEY}. Then say muster-agent adopt \
             take-over on each host whose member is taken over already"
        ))
    };
    let record: TakeOverRecord =
        serde_json::from_slice(bytes).map_err(|error| bad(error.to_string()))?;
    match record.version {
        VERSION => Ok((stored, record.for_list(list))),
        newer => Err(bad(format!("version {newer}, this program knows {VERSION}"))),
    }
}

/// Records that this member is being restarted. Fails if another member is being restarted.
pub(crate) async fn begin(
    cluster: &ClusterApiClient,
    list: Digest,
    id: MemberId,
    name: &str,
) -> Result<(), ExitError> {
    let members = cluster.list_members().await.map_err(store_error)?;
    let members: Vec<MemberId> = members.list.iter().map(|member| member.id).collect();
    change(cluster, list, |record| {
        record.begin(id, name, &members).map_err(|other| {
            ExitError::Failed(format!(
                "the member {other} is being restarted by another host: wait until it is done, or \
                 finish it there. If that host is lost, remove its member from the cluster. One member \
                 at a time may be down"
            ))
        })
    })
    .await
}

/// Records that the member's restart is over, and whether an agent runs the member.
pub(crate) async fn end(
    cluster: &ClusterApiClient,
    list: Digest,
    id: MemberId,
    is_managed: bool,
) -> Result<(), ExitError> {
    change(cluster, list, |record| {
        record.end(id, is_managed);
        Ok(())
    })
    .await
}

/// Records that the member runs again, without the agent that ran it.
pub(crate) async fn release(
    cluster: &ClusterApiClient,
    list: Digest,
    id: MemberId,
) -> Result<(), ExitError> {
    change(cluster, list, |record| {
        record.release(id);
        Ok(())
    })
    .await
}

async fn change(
    cluster: &ClusterApiClient,
    list: Digest,
    edit: impl Fn(&mut TakeOverRecord) -> Result<(), ExitError>,
) -> Result<(), ExitError> {
    for _ in 0..TRIES {
        let (stored, before) = read(cluster, list).await?;
        let mut record = before.clone();
        edit(&mut record)?;
        if record == before && stored.value.is_some() {
            return Ok(());
        }
        let text = serde_json::to_vec(&record).expect("plain structs always serialise");
        match cluster.replace_key_if_unchanged(KEY, &stored, &text).await {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            // The answer may have been lost. The next read shows whether the change was made.
            Err(error) if error.is_retryable() => {}
            Err(error) => return Err(store_error(error)),
        }
    }
    Err(ExitError::Failed(format!(
        "the key {KEY} in the cluster's store could not be changed in {TRIES} tries: try again"
    )))
}

fn store_error(error: ClusterError) -> ExitError {
    ExitError::Failed(format!("the cluster's store: {}", error_chain(&error)))
}

#[cfg(test)]
mod tests {
    use discovery_types::adoption::AdoptedMember;
    use discovery_types::digest;
    use discovery_types::fixtures::ClusterFixture;

    use super::*;
    use crate::cluster::ClusterMember;

    /// Returns the ids of the members `a` to `c` (0xa to 0xc) that are in the cluster and that no
    /// agent runs.
    fn unmanaged(record: &TakeOverRecord, present: &[MemberId]) -> Vec<MemberId> {
        let world = ClusterFixture::new(3);
        let member = |(id, record): (u64, &discovery_types::record::Record)| AdoptedMember {
            id: digest::MemberId::new(id),
            name: record.name.clone(),
            peer_url: record.peer_urls[0].clone(),
            client_urls: record.client_urls.clone(),
        };
        let signed = (0xa..).zip(&world.records).map(member).collect();
        let adoption = Adoption { raft_cluster: "0".repeat(15) + "1", members: signed };
        let present = present.iter().map(|id| ClusterMember {
            id: *id,
            name: String::new(),
            peer_urls: Vec::new(),
            client_urls: Vec::new(),
            is_learner: false,
        });
        let members = MemberList { list: present.collect(), ..MemberList::default() };
        record.unmanaged(&adoption, &members).into_iter().map(|(id, _)| id).collect()
    }

    #[test]
    fn a_signed_member_is_unmanaged_until_its_take_over_or_its_removal() {
        let [a, b, c] = [0xa, 0xb, 0xc].map(MemberId);
        let mut record = TakeOverRecord::default();
        record.end(b, true);
        assert_eq!(unmanaged(&record, &[a, b, c]), [a, c]);
        assert_eq!(unmanaged(&record, &[b, c]), [c]);
        record.end(c, true);
        assert!(unmanaged(&record, &[b, c]).is_empty());
        record.end(b, false);
        assert_eq!(unmanaged(&record, &[b, c]), [b]);
    }

    #[test]
    fn a_released_member_counts_as_taken_over_until_its_own_etcd_runs_again() {
        let [a, b, c] = [0xa, 0xb, 0xc].map(MemberId);
        let mut record = TakeOverRecord::default();
        assert!(!serde_json::to_string(&record).unwrap().contains("released"));
        for member in [a, b] {
            record.end(member, true);
        }
        assert_eq!(record.begin(b, "b", &[a, b, c]), Ok(()));
        record.release(b);
        assert_eq!(record.begin(c, "c", &[a, b, c]), Ok(()), "the release is over");
        assert_eq!(record.managed, ["a"], "no agent runs it");
        let text = serde_json::to_string(&record).unwrap();
        let mut record: TakeOverRecord = serde_json::from_str(&text).unwrap();
        assert_eq!(unmanaged(&record, &[a, b, c]), [c]);
        record.release(b);
        assert_eq!(record.released, ["b"], "a repeated release changes nothing");
        record.end(b, false);
        assert_eq!(unmanaged(&record, &[a, b, c]), [b, c]);
    }

    #[test]
    fn a_record_from_another_clusters_backup_counts_as_empty() {
        let (own, other) = (Digest::of(b"own"), Digest::of(b"other"));
        let mut record = TakeOverRecord::empty(other);
        let (a, b) = (MemberId(0xa), MemberId(0xb));
        record.end(a, true);
        assert!(!record.is_restarting(a));
        assert_eq!(record.begin(b, "b", &[a, b]), Ok(()));
        assert_eq!(record.clone().for_list(other), record);
        assert_eq!(record.clone().for_list(own), TakeOverRecord::empty(own));
        // Older agents write no hash of the list of members.
        let text = r#"{"version":1,"managed":["a"]}"#;
        let older: TakeOverRecord = serde_json::from_str(text).unwrap();
        let kept = older.for_list(own);
        assert_eq!((unmanaged(&kept, &[a, b]), kept.list), (vec![b], Some(own)));
        assert!(serde_json::to_string(&kept).unwrap().contains(&own.to_string()));
    }

    #[test]
    fn one_member_at_a_time_is_restarted() {
        let mut record = TakeOverRecord::default();
        let (a, b) = (MemberId(0xa), MemberId(0xb));
        assert!(!record.is_restarting(a));
        assert_eq!(record.begin(a, "a", &[a, b]), Ok(()));
        assert!(record.is_restarting(a) && !record.is_restarting(b));
        assert_eq!(record.begin(a, "a", &[a, b]), Ok(()), "a host goes on with its own");
        assert_eq!(record.begin(b, "b", &[a, b]), Err("a".to_owned()));
        record.end(b, false);
        assert_eq!(record.begin(b, "b", &[a, b]), Err("a".to_owned()), "only its own host ends it");
        record.end(a, true);
        assert_eq!(record.begin(b, "b", &[a, b]), Ok(()));
        record.end(b, true);
        assert_eq!(record.managed, ["a", "b"]);
        record.end(a, false);
        assert_eq!(record.managed, ["b"]);
        assert_eq!(record.begin(a, "a", &[a, b]), Ok(()));
        assert_eq!(record.begin(b, "b", &[b]), Ok(()), "a was removed from the cluster");
    }
}
