//! Reads this host's zone and identity document from the cloud's metadata service.
//!
//! | cloud | source of the zone | zone |
//! |---|---|---|
//! | AWS | `latest/meta-data/placement/availability-zone`, with a session token (IMDSv2) | `eu-west-1a` |
//! | GCP | `computeMetadata/v1/instance/zone`: `projects/…/zones/ZONE` | `europe-west1-b` |
//! | Azure | `metadata/instance/compute`: location and zone | `westeurope-2` |
//!
//! | cloud | source of the identity document |
//! |---|---|
//! | AWS | `latest/dynamic/instance-identity/rsa2048`, with a session token |
//! | GCP | `computeMetadata/v1/instance/service-accounts/default/identity`, `format=full` |
//! | Azure | `metadata/identity/oauth2/token`, for the audience that the operator names |

use std::time::Duration;

use discovery_types::name::{Name, NameError};
use muster_identity::{Cloud, IdentityDocument};
use serde::Deserialize;

use crate::exit::error_chain;

/// Link-local address of the metadata service. All three clouds use this address.
pub(crate) const METADATA_URL: &str = "http://169.254.169.254";
/// Time limit of one request. It is short, because the cloud's metadata service is on the host's
/// own machine.
const REQUEST_LIMIT: Duration = Duration::from_secs(2);
/// Number of tries: right after the boot, the network may not be up yet.
const TRIES: u32 = 5;
/// Pause between two tries.
const PAUSE: Duration = Duration::from_secs(2);
/// Longest answer that is read, in bytes. Azure's description of a machine has some kilobytes.
const MAX_ANSWER: usize = 64 * 1024;
/// Lifetime of the session token that AWS requires (IMDSv2), in seconds.
const SESSION_SECONDS: &str = "60";

/// Why a request to the metadata service failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MetadataError {
    /// The metadata service doesn't answer, or refuses.
    #[error("the cloud's metadata service doesn't answer")]
    Request(#[from] reqwest::Error),
    /// The answer is longer than [`MAX_ANSWER`].
    #[error("the cloud's metadata service answers more than {MAX_ANSWER} bytes")]
    TooLong,
    /// The answer has no zone in the expected form.
    #[error("the cloud's metadata service names no zone")]
    NoZone,
    /// The answer is no identity document.
    #[error("the cloud's metadata service gives no identity document")]
    NoIdentity,
    /// The zone's name is no valid name at discovery.
    #[error("the cloud's zone `{zone}` can't be used")]
    BadName {
        /// Zone as the cloud calls it.
        zone: String,
        /// Rule that the zone breaks.
        #[source]
        source: NameError,
    },
}

/// Location of a machine, in Azure's description of it.
#[derive(Deserialize)]
struct AzureCompute {
    location: String,
    /// Zone of the machine; empty in a region without zones.
    #[serde(default)]
    zone: String,
}

/// Returns the zone of this host according to the metadata service at `url`. Makes up to [`TRIES`]
/// requests if they fail.
pub(crate) async fn zone(cloud: Cloud, url: &str) -> Result<Name, MetadataError> {
    let mut failed = 0;
    loop {
        match zone_once(cloud, url).await {
            Err(error @ MetadataError::Request(_)) if failed + 1 < TRIES => {
                failed += 1;
                tracing::warn!(error = error_chain(&error), "the zone is not known yet");
                tokio::time::sleep(PAUSE).await;
            }
            ended => return ended,
        }
    }
}

async fn zone_once(cloud: Cloud, url: &str) -> Result<Name, MetadataError> {
    let client = metadata_client()?;
    let get = |path: &str| client.get(format!("{url}/{path}"));
    let zone = match cloud {
        Cloud::Aws => {
            let path = "latest/meta-data/placement/availability-zone";
            read(with_session(&client, url, get(path)).await?).await?.trim().to_owned()
        }
        Cloud::Gcp => {
            let zone = get("computeMetadata/v1/instance/zone").header("Metadata-Flavor", "Google");
            let zone = read(zone).await?;
            let (_, zone) = zone.trim().rsplit_once("/zones/").ok_or(MetadataError::NoZone)?;
            zone.to_owned()
        }
        Cloud::Azure => {
            let compute = get("metadata/instance/compute?api-version=2021-02-01&format=json")
                .header("Metadata", "true");
            let compute = read(compute).await?;
            let compute: AzureCompute =
                serde_json::from_str(&compute).map_err(|_| MetadataError::NoZone)?;
            match &*compute.zone {
                "" => compute.location,
                zone => format!("{}-{zone}", compute.location),
            }
        }
    };
    zone.parse().map_err(|source| MetadataError::BadName { zone, source })
}

/// Source of this host's identity documents.
#[derive(Clone, Debug)]
pub(crate) struct IdentitySource {
    /// Cloud that the host runs in.
    pub cloud: Cloud,
    /// Audience of Azure's identity documents, which aren't bound to the agent's key.
    pub audience: Option<String>,
    /// Address of the cloud's metadata service.
    pub metadata_url: String,
}

impl IdentitySource {
    /// Gets a new identity document. On GCP, the audience `bound` binds the document to the agent's
    /// key.
    pub(crate) async fn document(&self, bound: &str) -> Result<IdentityDocument, MetadataError> {
        let client = metadata_client()?;
        let url = &self.metadata_url;
        let get = |path: &str| client.get(format!("{url}/{path}"));
        let text = match self.cloud {
            Cloud::Aws => {
                let document = get("latest/dynamic/instance-identity/rsa2048");
                read(with_session(&client, url, document).await?).await?
            }
            Cloud::Gcp => {
                let path = "computeMetadata/v1/instance/service-accounts/default/identity";
                let query = with_query(path, &[("audience", bound), ("format", "full")]);
                let document = get(&query).header("Metadata-Flavor", "Google");
                read(document).await?
            }
            Cloud::Azure => {
                let audience = self.audience.as_deref().unwrap_or_default();
                let query = [("api-version", "2018-02-01"), ("resource", audience)];
                let query = with_query("metadata/identity/oauth2/token", &query);
                let document = get(&query).header("Metadata", "true");
                let token: AzureToken = serde_json::from_str(&read(document).await?)
                    .map_err(|_| MetadataError::NoIdentity)?;
                token.access_token
            }
        };
        let text = text.trim().to_owned();
        match text.is_empty() {
            true => Err(MetadataError::NoIdentity),
            false => Ok(IdentityDocument { cloud: self.cloud, text }),
        }
    }
}

/// Answer of Azure's metadata service with a token of the machine's managed identity.
#[derive(Deserialize)]
struct AzureToken {
    access_token: String,
}

/// Makes a client for metadata services. It uses no proxy, because the address is link-local. The
/// service speaks plain HTTP, so the client trusts no root CA.
fn metadata_client() -> Result<reqwest::Client, reqwest::Error> {
    let tls = rustls::ClientConfig::builder_with_provider(muster_tls::provider())
        .with_safe_default_protocol_versions()
        .expect("the provider has the default versions")
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth();
    reqwest::Client::builder()
        .no_proxy()
        .timeout(REQUEST_LIMIT)
        .tls_backend_preconfigured(tls)
        .build()
}

/// Returns `path` with these query parameters.
fn with_query(path: &str, parameters: &[(&str, &str)]) -> String {
    let encoded = serde_urlencoded::to_string(parameters).expect("texts can be encoded");
    format!("{path}?{encoded}")
}

/// Adds the session token that AWS' metadata service asks for (IMDSv2).
async fn with_session(
    client: &reqwest::Client,
    url: &str,
    request: reqwest::RequestBuilder,
) -> Result<reqwest::RequestBuilder, MetadataError> {
    let session = client
        .put(format!("{url}/latest/api/token"))
        .header("X-aws-ec2-metadata-token-ttl-seconds", SESSION_SECONDS);
    let session = read(session).await?;
    Ok(request.header("X-aws-ec2-metadata-token", session.trim()))
}

/// Sends a request and reads its answer.
async fn read(request: reqwest::RequestBuilder) -> Result<String, MetadataError> {
    let mut answer = request.send().await?.error_for_status()?;
    let mut bytes = Vec::new();
    while let Some(chunk) = answer.chunk().await? {
        bytes.extend_from_slice(&chunk);
        if bytes.len() > MAX_ANSWER {
            return Err(MetadataError::TooLong);
        }
    }
    String::from_utf8(bytes).map_err(|_| MetadataError::NoZone)
}

#[cfg(test)]
mod tests {
    use axum::Router;
    use axum::http::{HeaderMap, Method, StatusCode, Uri};

    use super::*;

    /// Serves metadata as the three clouds do: each path with the header that its cloud needs.
    async fn metadata(azure: &'static str) -> String {
        let answer = move |method: Method, uri: Uri, headers: HeaderMap| async move {
            let has = |name: &str, value: &str| {
                headers.get(name).is_some_and(|sent| sent.as_bytes() == value.as_bytes())
            };
            let refused = (StatusCode::FORBIDDEN, "");
            match (method.as_str(), uri.path()) {
                ("PUT", "/latest/api/token")
                    if has("X-aws-ec2-metadata-token-ttl-seconds", SESSION_SECONDS) =>
                {
                    (StatusCode::OK, "session")
                }
                ("GET", "/latest/meta-data/placement/availability-zone")
                    if has("X-aws-ec2-metadata-token", "session") =>
                {
                    (StatusCode::OK, "eu-west-1a")
                }
                ("GET", "/computeMetadata/v1/instance/zone")
                    if has("Metadata-Flavor", "Google") =>
                {
                    (StatusCode::OK, "projects/1234/zones/europe-west1-b\n")
                }
                ("GET", "/metadata/instance/compute") if has("Metadata", "true") => {
                    (StatusCode::OK, azure)
                }
                ("GET", "/latest/dynamic/instance-identity/rsa2048")
                    if has("X-aws-ec2-metadata-token", "session") =>
                {
                    (StatusCode::OK, "MIAG\nAAAA\n")
                }
                ("GET", "/computeMetadata/v1/instance/service-accounts/default/identity")
                    if has("Metadata-Flavor", "Google")
                        && uri.query() == Some("audience=muster%3Ac%3Aa&format=full") =>
                {
                    (StatusCode::OK, "e30.e30.AA")
                }
                ("GET", "/metadata/identity/oauth2/token")
                    if has("Metadata", "true")
                        && uri.query()
                            == Some("api-version=2018-02-01&resource=api%3A%2F%2Fmuster") =>
                {
                    (StatusCode::OK, azure)
                }
                _ => refused,
            }
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, Router::new().fallback(answer)).await });
        url
    }

    #[tokio::test]
    async fn each_cloud_names_the_zone() {
        let url = metadata(r#"{"location":"westeurope","zone":"2","vmId":"x"}"#).await;
        for (cloud, named) in [
            (Cloud::Aws, "eu-west-1a"),
            (Cloud::Gcp, "europe-west1-b"),
            (Cloud::Azure, "westeurope-2"),
        ] {
            assert_eq!(zone(cloud, &url).await.unwrap().as_str(), named, "{cloud:?}");
        }
        let url = metadata(r#"{"location":"norwaywest","zone":""}"#).await;
        assert_eq!(zone(Cloud::Azure, &url).await.unwrap().as_str(), "norwaywest");
    }

    #[tokio::test]
    async fn each_cloud_gives_an_identity_document() {
        let metadata_url = metadata(r#"{"access_token":"e30.e30.BB","expires_in":"3599"}"#).await;
        for (cloud, text) in
            [(Cloud::Aws, "MIAG\nAAAA"), (Cloud::Gcp, "e30.e30.AA"), (Cloud::Azure, "e30.e30.BB")]
        {
            let (audience, metadata_url) = (Some("api://muster".to_owned()), metadata_url.clone());
            let source = IdentitySource { cloud, audience, metadata_url };
            let document = source.document("muster:c:a").await.unwrap();
            assert_eq!(document.text, text);
            assert_eq!(document.cloud, cloud);
        }
        let metadata_url = metadata("no JSON").await;
        let source = IdentitySource { cloud: Cloud::Azure, audience: None, metadata_url };
        assert!(matches!(source.document("").await, Err(MetadataError::Request(_))));
        let source = IdentitySource { audience: Some("api://muster".to_owned()), ..source };
        assert!(matches!(source.document("").await, Err(MetadataError::NoIdentity)));
    }

    #[tokio::test]
    async fn a_strange_answer_is_an_error_at_once() {
        for (azure, text) in [
            ("no JSON", "names no zone"),
            (r#"{"location":"West Europe"}"#, "`West Europe` can't be used"),
        ] {
            let error = zone(Cloud::Azure, &metadata(azure).await).await.unwrap_err();
            assert!(error.to_string().contains(text), "{error}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_service_that_does_not_answer_is_tried_again_and_then_an_error() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        drop(listener);
        let started = tokio::time::Instant::now();
        let error = zone(Cloud::Aws, &url).await.unwrap_err();
        assert!(matches!(error, MetadataError::Request(_)), "{error}");
        assert!(started.elapsed() >= PAUSE * (TRIES - 1));
    }
}
