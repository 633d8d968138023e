//! `cluster export`: writes a cluster's CAs, with encrypted keys, to a file for `ca issue`.

use std::path::Path;

use discovery_types::document::VerifiedDocument;
use discovery_types::role::Action;

use crate::cli::CliError;
use crate::cli::printer::Printer;
use crate::cli::session::AdminSession;

pub(super) async fn export(
    session: &AdminSession,
    cluster: &str,
    out: &Path,
    printer: &mut Printer,
) -> Result<(), CliError> {
    if out.exists() {
        // Refuse an existing file before the first request, so that nothing is exported in vain.
        return Err(muster_files::Error::Exists(out.to_path_buf()).into());
    }
    let cluster = session.cluster(cluster).await?;
    let chain = session.chain(cluster.cluster).await?;
    session.check_role_in_statement(&chain, Action::ExportCluster)?;
    let export = session.client.export_cluster(cluster.cluster).await?;
    let other = || CliError::Answer("the export is of another cluster".into());
    if export.cluster != cluster.cluster || export.statements != chain.jws() {
        return Err(other());
    }
    VerifiedDocument::verify(&export.document, &chain).map_err(|_| other())?;
    let text = serde_json::to_string_pretty(&export).expect("an export is a plain struct");
    muster_files::create(out, format!("{text}\n").as_bytes(), 0o600)?;
    let value = serde_json::json!({ "file": out, "cluster": cluster.cluster });
    printer.print_value(&value, |to| to.line(&out.display().to_string()))?;
    printer.note(
        "Its CA keys open with the service's key directory alone: keep a backup of that as well, \
         and keep both away from members.",
    );
    Ok(())
}
