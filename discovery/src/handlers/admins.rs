//! Handlers for the admin chain.

use actix_web::HttpRequest;
use actix_web::web::{Data, Json};
use discovery_types::api::{AdminList, SignedBody};
use discovery_types::problem::Problem;
use discovery_types::role::Action;

use super::body::JsonBody;
use crate::admins::Admins;
use crate::app::App;
use crate::auth::authorise;
use crate::error::ApiError;

/// Lists the admins, with the signed chain that proves them.
#[utoipa::path(get, path = "/v1/admins", tag = "admins",
    responses((status = 200, body = AdminList), (status = "default", body = Problem)))]
pub(crate) async fn list(
    request: HttpRequest,
    app: Data<App>,
) -> Result<Json<AdminList>, ApiError> {
    authorise(&request, &app, Action::ReadAdmins, None).await?;
    let admins = app.admins.current().await?;
    Ok(Json(list_of(&app, &admins)))
}

/// Adds or revokes an admin: the chain's next element, signed by an owner.
#[utoipa::path(put, path = "/v1/admins", tag = "admins", request_body = SignedBody,
    responses((status = 200, body = AdminList), (status = "default", body = Problem)))]
pub(crate) async fn put(
    request: HttpRequest,
    app: Data<App>,
    JsonBody(body): JsonBody<SignedBody>,
) -> Result<Json<AdminList>, ApiError> {
    let caller = authorise(&request, &app, Action::ChangeAdmins, None).await?;
    let admins = app.admins.current().await?;
    // Accept an element that is stored already: the client may retry after a lost response.
    if !admins.elements.contains(&body.jws) {
        let mut chain = admins.chain.clone();
        chain.append(&body.jws)?;
        app.store.put_admin_element(chain.seq(), &body.jws, &caller.name).await?;
        tracing::info!(by = caller.name, sequence = chain.seq(), "the admins have changed");
    }
    let admins = app.admins.current().await?;
    Ok(Json(list_of(&app, &admins)))
}

fn list_of(app: &App, admins: &Admins) -> AdminList {
    AdminList {
        root_owner: *app.admins.root(),
        chain: admins.elements.clone(),
        admins: admins.chain.admins().to_vec(),
    }
}
