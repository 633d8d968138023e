//! Cache of verified signatures: signed texts in rows, parsed and verified once.
//!
//! A record that somebody wrote into the database by hand must not make its host a member. So the
//! signature of each text is verified when the text is first read. The result is cached under the
//! text's hash.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use discovery_formation as formation;
use discovery_types::convert;
use discovery_types::digest::Digest;
use discovery_types::grant::{Grant, GrantError, VerifiedGrant};
use discovery_types::jws::{Jws, JwsError, JwsType};
use discovery_types::key::PublicKey;
use discovery_types::record::{Endorsement, Record, SignedRecord, VerifiedRecord};
use discovery_types::statement::{StatementChain, StatementError};
use uuid::Uuid;

use super::super::StoreError;
use super::load::Trust;

/// Maximum size of the cached results of each kind, in bytes as [`cached_size`] estimates them. A
/// full cache is emptied.
const MAX_CACHED: usize = 32 << 20;
/// Estimated size of one cached result without its text, in bytes: its place in the map, its
/// allocations, and the fields that have a fixed size.
const FIXED_SIZE: usize = 1_024;

/// Caches of verified records, statement chains and grants.
#[derive(Debug, Default)]
pub(crate) struct Caches {
    records: Mutex<Cache<formation::AgentRecord>>,
    chains: Mutex<Cache<StatementChain>>,
    grants: Mutex<Cache<Grant>>,
    /// Grants whose signers the newest statement of their chain allows.
    newest_grants: Mutex<Cache<VerifiedGrant>>,
}

/// Cached results of one kind. The key is the hash of the text that was verified.
#[derive(Debug)]
struct Cache<T> {
    results: BTreeMap<Digest, Arc<T>>,
    /// Sum of the results' estimated sizes, in bytes.
    size: usize,
}

impl<T> Default for Cache<T> {
    fn default() -> Self {
        Cache { results: BTreeMap::new(), size: 0 }
    }
}

/// Estimates the memory of a cached result, in bytes, from the length of its signed texts. A parsed
/// value holds the text, and the text's content a second time.
fn cached_size(text_bytes: usize) -> usize {
    text_bytes.saturating_mul(2).saturating_add(FIXED_SIZE)
}

impl Caches {
    /// Returns a cluster's verified statement chain.
    pub(super) fn chain(
        &self,
        cluster: Uuid,
        rows: &[String],
    ) -> Result<Arc<StatementChain>, StoreError> {
        let damaged = |what: &str| StoreError::damaged(format!("{what} of cluster {cluster}"));
        if rows.is_empty() {
            return Err(damaged("the statement chain"));
        }
        // Joining with line breaks is unambiguous, because a JWS contains none.
        let name = Digest::of(rows.join("\n").as_bytes());
        if let Some(chain) = read_cache(&self.chains, &name) {
            return Ok(chain);
        }
        let unreadable =
            |error: StatementError| StoreError::unreadable(&error, || damaged("a statement"));
        let jws = |(seq, row): (u64, &String)| {
            row.parse::<Jws>().map_err(|source| StatementError::Jws { seq, source })
        };
        let jws = (0..).zip(rows).map(jws).collect::<Result<Vec<_>, _>>().map_err(unreadable)?;
        let chain = StatementChain::verify_links(&jws).map_err(unreadable)?;
        let chain = Some(chain).filter(|chain| chain.newest().cluster == cluster);
        let chain = Arc::new(chain.ok_or_else(|| damaged("a statement"))?);
        write_cache(&self.chains, name, &chain, rows.iter().map(String::len).sum());
        Ok(chain)
    }

    /// Returns a stored grant after verifying its signature. The grant is valid if any statement of
    /// the chain allows its signer. A redeem is checked against the newest statement only, but
    /// seats that were given earlier stay valid.
    pub(super) fn grant(
        &self,
        jws: &str,
        chain: &StatementChain,
        trust: Trust,
    ) -> Result<Arc<Grant>, StoreError> {
        let name = Digest::of_parts(&[jws.as_bytes(), chain.newest_hash().as_bytes()]);
        if let Some(grant) = read_cache(&self.grants, &name) {
            return Ok(grant);
        }
        let damaged =
            || StoreError::damaged("a grant's signature isn't valid: somebody changed it");
        let unreadable = |error: JwsError| StoreError::unreadable(&error, damaged);
        let length = jws.len();
        let jws: Jws = jws.parse().map_err(unreadable)?;
        let claimed: Grant = jws.claims_unverified(JwsType::Grant).map_err(unreadable)?;
        let grant = match trust {
            Trust::Unverified => Some(claimed),
            Trust::Verify => {
                VerifiedGrant::verify_kept(&jws, chain).ok().map(|grant| (*grant).clone())
            }
        };
        let grant = Arc::new(grant.ok_or_else(damaged)?);
        if trust == Trust::Verify {
            write_cache(&self.grants, name, &grant, length);
        }
        Ok(grant)
    }

    /// Verifies a grant under the newest statement of the chain, as [`VerifiedGrant::verify`] does.
    /// The result is cached, because all hosts of a cluster redeem the same few tokens.
    pub(crate) fn newest_grant(
        &self,
        jws: &Jws,
        chain: &StatementChain,
    ) -> Result<Arc<VerifiedGrant>, GrantError> {
        // The newest statement's hash stands for the whole chain, because each statement contains
        // the hash of the one before.
        let text = jws.as_str();
        let name = Digest::of_parts(&[text.as_bytes(), chain.newest_hash().as_bytes()]);
        if let Some(grant) = read_cache(&self.newest_grants, &name) {
            return Ok(grant);
        }
        let grant = Arc::new(VerifiedGrant::verify(jws, chain)?);
        // The cached grant holds its JWS as well, so its text counts twice.
        write_cache(&self.newest_grants, name, &grant, 2 * text.len());
        // A grant in a row may be signed under any statement of the chain. This grant passes under
        // the newest one, so don't verify it again when its row is read.
        write_cache(&self.grants, name, &Arc::new(Grant::clone(&grant)), text.len());
        Ok(grant)
    }

    /// Adds a record that a redeem has verified, so that it isn't verified again when its row is
    /// read. `grant` is the grant under which it was verified.
    pub(crate) fn add_record(&self, record: &VerifiedRecord, grant: &VerifiedGrant) {
        let signed = record.signed();
        let texts = [signed.record.as_str(), signed.endorsement.as_str()];
        let length = texts.iter().map(|text| text.len()).sum();
        let name = record_name(texts, &grant.key);
        write_cache(&self.records, name, &convert::record(record), length);
    }

    /// Returns a stored record. Verifies it unless it is in the cache, or `trust` is
    /// [`Trust::Unverified`]. `token_key` is the key of the grant that the record names.
    pub(super) fn stored_record(
        &self,
        record: &str,
        endorsement: &str,
        token_key: &PublicKey,
        trust: Trust,
    ) -> Result<Arc<formation::AgentRecord>, StoreError> {
        let name = record_name([record, endorsement], token_key);
        if let Some(record) = read_cache(&self.records, &name) {
            return Ok(record);
        }
        let read = match trust {
            Trust::Verify => verify(record, endorsement, token_key),
            Trust::Unverified => read_unverified_record(record, endorsement),
        };
        let damaged =
            || StoreError::damaged("a record's signature isn't valid: somebody changed the row");
        let verified = read.map_err(|error| StoreError::unreadable(&*error, damaged))?;
        let verified = Arc::new(verified.ok_or_else(damaged)?);
        if trust == Trust::Verify {
            write_cache(&self.records, name, &verified, record.len() + endorsement.len());
        }
        Ok(verified)
    }
}

/// Returns the key under which a record is cached.
fn record_name([record, endorsement]: [&str; 2], token_key: &PublicKey) -> Digest {
    let key = &token_key.as_bytes()[..];
    Digest::of_parts(&[record.as_bytes(), b"\n", endorsement.as_bytes(), key])
}

fn read_cache<T>(cache: &Mutex<Cache<T>>, name: &Digest) -> Option<Arc<T>> {
    cache.lock().unwrap_or_else(PoisonError::into_inner).results.get(name).cloned()
}

fn write_cache<T>(cache: &Mutex<Cache<T>>, name: Digest, value: &Arc<T>, text_bytes: usize) {
    let size = cached_size(text_bytes);
    let mut cache = cache.lock().unwrap_or_else(PoisonError::into_inner);
    if cache.size.saturating_add(size) > MAX_CACHED {
        *cache = Cache::default();
    }
    if cache.results.insert(name, value.clone()).is_none() {
        cache.size += size;
    }
}

/// Result of reading a record. It is `Ok(None)` if the record's signatures don't belong together.
/// The error says why the record can't be read.
type ReadRecord = Result<Option<formation::AgentRecord>, Box<dyn std::error::Error>>;

fn verify(record: &str, endorsement: &str, token_key: &PublicKey) -> ReadRecord {
    let signed = SignedRecord { record: record.parse()?, endorsement: endorsement.parse()? };
    let claimed: Record = signed.record.claims_unverified(JwsType::Record)?;
    let record: Record = signed.record.verify(JwsType::Record, &claimed.agent_key)?;
    let endorsement: Endorsement = signed.endorsement.verify(JwsType::Endorsement, token_key)?;
    let bound = endorsement.record == signed.record.hash()
        && endorsement.cluster == record.cluster
        && endorsement.grant == record.grant;
    let node_key = record.csr.verify()?.node_key;
    Ok(bound.then(|| convert::read_record(&record, &signed, &node_key)))
}

/// Reads a record without verifying it, to abandon a damaged cluster.
fn read_unverified_record(record: &str, endorsement: &str) -> ReadRecord {
    let signed = SignedRecord { record: record.parse()?, endorsement: endorsement.parse()? };
    let record: Record = signed.record.claims_unverified(JwsType::Record)?;
    let node_key = Digest::of(record.csr.der());
    Ok(Some(convert::read_record(&record, &signed, &node_key)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_never_grows_beyond_its_size() {
        let cache: Mutex<Cache<u64>> = Mutex::default();
        let count = || {
            let cache = cache.lock().unwrap();
            assert!(cache.size <= MAX_CACHED, "{}", cache.size);
            cache.results.len()
        };
        let most = MAX_CACHED / cached_size(10_000);
        for number in 0..most as u64 {
            write_cache(&cache, Digest::of(&number.to_be_bytes()), &Arc::new(number), 10_000);
        }
        assert_eq!(count(), most);
        let first = Digest::of(&0_u64.to_be_bytes());
        assert_eq!(read_cache(&cache, &first), Some(Arc::new(0)));
        write_cache(&cache, Digest::of(b"one more"), &Arc::new(1), 10_000);
        assert_eq!((count(), read_cache(&cache, &first)), (1, None));
        // Caching a result a second time takes no more memory.
        write_cache(&cache, Digest::of(b"one more"), &Arc::new(1), 10_000);
        assert_eq!(cache.lock().unwrap().size, cached_size(10_000));
    }
}
