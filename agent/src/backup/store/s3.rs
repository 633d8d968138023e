//! A bucket of an S3-compatible store.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt, TryStreamExt};
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::client::{HttpClient, HttpConnector};
use object_store::path::Path;
use object_store::{
    BackoffConfig, ClientConfigKey, ClientOptions, ObjectStore, ObjectStoreExt, RetryConfig,
    WriteMultipart,
};
use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

use super::credentials::S3Credentials;
use super::{BackupStoreError, STALL_LIMIT, StoredBytes, within};
use crate::backup::chunks::ChunkSource;
use crate::backup::name::ClusterFolder;
use crate::backup::settings::S3Settings;
use crate::exit::error_chain;

/// Size in bytes of the parts of a large file. S3 takes at most 10,000 parts, which are 78 GiB.
const PART_BYTES: usize = 8 << 20;
/// Number of parts that are sent at one time.
const PARALLEL_PARTS: usize = 2;
/// The longest that connecting may take.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// The longest that a store may be silent within a request. One part takes less at 70 KiB/s.
const SILENCE_LIMIT: Duration = Duration::from_mins(2);
/// Maximum number of times that a request is repeated.
const MAX_RETRIES: usize = 4;
/// Time after which a request is not repeated any more.
const RETRY_LIMIT: Duration = Duration::from_mins(2);
/// Maximum length in characters of a store's error.
const MAX_ERROR_CHARS: usize = 600;
/// Maximum size in bytes of a file with CA certificates.
const MAX_CA_FILE: u64 = 1 << 20;

/// A store in a bucket, below a prefix.
pub(crate) struct S3Store {
    bucket: AmazonS3,
    prefix: Path,
    /// URL of bucket and prefix, for messages.
    place: String,
}

impl fmt::Debug for S3Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The bucket's own `Debug` form shows settings that don't belong in a log.
        f.debug_tuple("S3Store").field(&self.place).finish()
    }
}

impl S3Store {
    /// Opens a bucket. `AWS_…` environment variables are read as the `aws` tool reads them;
    /// `settings` override them.
    pub(super) fn open(settings: &S3Settings) -> Result<Self, BackupStoreError> {
        let mut builder = AmazonS3Builder::from_env().with_bucket_name(&settings.bucket);
        if let Some(endpoint) = &settings.endpoint {
            builder = builder.with_endpoint(endpoint);
        }
        if let Some(file) = &settings.credentials {
            let credentials = S3Credentials::read(file).map_err(BackupStoreError::Settings)?;
            builder = builder
                .with_access_key_id(&credentials.access_key_id)
                .with_secret_access_key(credentials.secret_access_key.as_str());
            if let Some(token) = &credentials.session_token {
                builder = builder.with_token(token.as_str());
            }
        }
        // Only a URL in `settings` may be without TLS. A URL in an environment variable may have
        // been set for another purpose.
        let is_plain = settings.endpoint.as_ref().is_some_and(|url| url.starts_with("http://"));
        let retry = RetryConfig {
            backoff: BackoffConfig::default(),
            max_retries: MAX_RETRIES,
            retry_timeout: RETRY_LIMIT,
        };
        let options = ClientOptions::new().with_allow_http(is_plain);
        let place = settings.place();
        let failed = |error: object_store::Error| BackupStoreError::Remote {
            place: place.clone(),
            text: summarise(&error_chain(&error)),
        };
        let bucket = builder
            .with_client_options(options)
            .with_http_connector(RustlsConnector::new(settings)?)
            .with_retry(retry)
            .build()
            .map_err(failed)?;
        let prefix = Path::from(settings.prefix.as_str());
        Ok(Self { bucket, prefix, place })
    }

    fn failed(&self, file: &str) -> impl Fn(object_store::Error) -> BackupStoreError + use<> {
        let (place, file) = (self.place.clone(), file.to_owned());
        move |error| match error {
            object_store::Error::NotFound { .. } => {
                BackupStoreError::Missing(format!("{place}/{file}"))
            }
            error => BackupStoreError::Remote {
                place: place.clone(),
                text: summarise(&error_chain(&error)),
            },
        }
    }

    fn folder(&self, cluster: &ClusterFolder) -> Path {
        self.prefix.clone().join(cluster.as_str())
    }

    fn path(&self, cluster: &ClusterFolder, file: &str) -> Path {
        self.folder(cluster).join(file)
    }

    /// Returns the names of the folders below the prefix. Fails if there are more than `limit`.
    pub(super) async fn folders(&self, limit: usize) -> Result<Vec<String>, BackupStoreError> {
        let listed = self.bucket.list_with_delimiter(Some(&self.prefix)).await;
        let listed = listed.map_err(self.failed(""))?;
        if listed.common_prefixes.len() > limit {
            let what = self.place.clone();
            return Err(BackupStoreError::TooLong { what, limit: limit as u64 });
        }
        let names = listed.common_prefixes.iter().filter_map(|path| path.filename());
        Ok(names.map(str::to_owned).collect())
    }

    /// Returns the names of a cluster's files. Fails if there are more than `limit`.
    pub(super) async fn files(
        &self,
        cluster: &ClusterFolder,
        limit: usize,
    ) -> Result<Vec<String>, BackupStoreError> {
        let folder = self.folder(cluster);
        let mut listed = self.bucket.list(Some(&folder));
        let mut names = Vec::new();
        while let Some(object) = listed.try_next().await.map_err(self.failed(cluster.as_str()))? {
            if names.len() == limit {
                let what = format!("{}/{cluster}", self.place);
                return Err(BackupStoreError::TooLong { what, limit: limit as u64 });
            }
            // Skip files in subfolders: this program writes none there.
            let below = object.location.prefix_match(&folder).map_or(0, Iterator::count);
            if below == 1 {
                names.extend(object.location.filename().map(str::to_owned));
            }
        }
        Ok(names)
    }

    pub(super) async fn put(
        &self,
        cluster: &ClusterFolder,
        file: &str,
        source: &mut ChunkSource,
    ) -> Result<(), BackupStoreError> {
        let path = self.path(cluster, file);
        let begun = self.bucket.put_multipart(&path);
        let begun = within("begin an upload", STALL_LIMIT, async {
            begun.await.map_err(self.failed(file))
        });
        let mut upload = WriteMultipart::new_with_chunk_size(begun.await?, PART_BYTES);
        match self.send_parts(&mut upload, file, source).await {
            Ok(()) => {
                within("end an upload", STALL_LIMIT, async {
                    upload.finish().await.map(drop).map_err(self.failed(file))
                })
                .await
            }
            Err(error) => {
                // If the upload can't be aborted, a lifecycle rule of the bucket removes its parts
                // (docs/cluster-backups.md).
                let aborted = tokio::time::timeout(STALL_LIMIT, upload.abort()).await;
                if !matches!(aborted, Ok(Ok(()))) {
                    tracing::warn!("an upload to {} can't be ended: its parts stay", self.place);
                }
                Err(error)
            }
        }
    }

    async fn send_parts(
        &self,
        upload: &mut WriteMultipart,
        file: &str,
        source: &mut ChunkSource,
    ) -> Result<(), BackupStoreError> {
        while let Some(chunk) = source.next().await.map_err(BackupStoreError::Source)? {
            within("take a part of an upload", STALL_LIMIT, async {
                upload.wait_for_capacity(PARALLEL_PARTS).await.map_err(self.failed(file))
            })
            .await?;
            upload.put(chunk);
        }
        Ok(())
    }

    pub(super) async fn put_small(
        &self,
        cluster: &ClusterFolder,
        file: &str,
        bytes: Vec<u8>,
    ) -> Result<(), BackupStoreError> {
        let put = self.bucket.put(&self.path(cluster, file), bytes.into()).await;
        put.map(drop).map_err(self.failed(file))
    }

    pub(super) async fn size(
        &self,
        cluster: &ClusterFolder,
        file: &str,
    ) -> Result<u64, BackupStoreError> {
        let found = self.bucket.head(&self.path(cluster, file)).await;
        Ok(found.map_err(self.failed(file))?.size)
    }

    pub(super) async fn get(
        &self,
        cluster: &ClusterFolder,
        file: &str,
    ) -> Result<StoredBytes, BackupStoreError> {
        let found = self.bucket.get(&self.path(cluster, file)).await;
        let failed = self.failed(file);
        let found = found.map_err(&failed)?;
        Ok(found.into_stream().map_err(failed).boxed())
    }

    pub(super) async fn delete(
        &self,
        cluster: &ClusterFolder,
        file: &str,
    ) -> Result<(), BackupStoreError> {
        match self.bucket.delete(&self.path(cluster, file)).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(self.failed(file)(error)),
        }
    }
}

/// Cuts off the body of a store's answer, apart from its code and its message. The body may repeat
/// the signed request, with a token in it.
fn summarise(error: &str) -> String {
    let (text, body) = error.split_at(error.find('<').unwrap_or(error.len()));
    let element = |name: &str| {
        let (_, rest) = body.split_once(&format!("<{name}>"))?;
        rest.split_once(&format!("</{name}>")).map(|(value, _)| value)
    };
    let parts = [element("Code"), element("Message")].into_iter().flatten();
    let said = parts.collect::<Vec<_>>().join(": ");
    let text = text.trim_end_matches([' ', ':']);
    let whole = if said.is_empty() { text.to_owned() } else { format!("{text}: {said}") };
    whole.chars().take(MAX_ERROR_CHARS).collect()
}

/// Makes HTTP clients with the agent's TLS library. The crate's own connector would add a second
/// one.
#[derive(Debug)]
struct RustlsConnector {
    tls: Arc<rustls::ClientConfig>,
}

impl RustlsConnector {
    fn new(settings: &S3Settings) -> Result<Self, BackupStoreError> {
        let mut roots = RootCertStore::empty();
        match &settings.ca {
            Some(file) => {
                let failed = |error: &dyn std::error::Error| {
                    let text = error_chain(error);
                    BackupStoreError::Settings(format!("--backup-ca {}: {text}", file.display()))
                };
                let pem = muster_files::read_named(file, MAX_CA_FILE).map_err(|e| failed(&e))?;
                for certificate in CertificateDer::pem_slice_iter(&pem) {
                    let certificate = certificate.map_err(|error| failed(&error))?;
                    roots.add(certificate).map_err(|error| failed(&error))?;
                }
                if roots.is_empty() {
                    return Err(failed(&std::io::Error::other("it has no certificate in PEM")));
                }
            }
            None => {
                roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            }
        }
        let tls = rustls::ClientConfig::builder_with_provider(muster_tls::provider())
            .with_safe_default_protocol_versions()
            .map_err(|error| BackupStoreError::Settings(error.to_string()))?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Self { tls: Arc::new(tls) })
    }
}

impl HttpConnector for RustlsConnector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let allowed = options.get_config_value(&ClientConfigKey::AllowHttp);
        let client = reqwest::Client::builder()
            .tls_backend_preconfigured(rustls::ClientConfig::clone(&self.tls))
            .https_only(allowed.as_deref() != Some("true"))
            .http1_only()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(CONNECT_LIMIT)
            .read_timeout(SILENCE_LIMIT)
            .user_agent(concat!("muster/", env!("CARGO_PKG_VERSION")))
            .build();
        let failed = |source: reqwest::Error| object_store::Error::Generic {
            store: "S3",
            source: source.into(),
        };
        Ok(HttpClient::new(client.map_err(failed)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_has_the_stores_code_and_message_and_not_the_request() {
        let error = "Server returned non-2xx status code: 403 Forbidden: <?xml version=\"1.0\"?> \
                     <Error><Code>SignatureDoesNotMatch</Code><Message>Check your key.</Message>\
                     <CanonicalRequest>x-amz-security-token:hush</CanonicalRequest></Error>";
        let shown = summarise(error);
        assert_eq!(
            shown,
            "Server returned non-2xx status code: 403 Forbidden: SignatureDoesNotMatch: Check your key."
        );
        assert_eq!(summarise("Connection refused"), "Connection refused");
        assert_eq!(summarise(&"x".repeat(10_000)).len(), MAX_ERROR_CHARS);
    }
}
