//! Frame around every page, and how pages are sent.

use actix_web::HttpResponse;
use actix_web::http::StatusCode;
use askama::Template;
use discovery_types::role::Action;

use super::assets;
use super::error::ConsoleError;
use super::text::ShownTime;
use super::visitor::Visitor;
use crate::app::App;
use crate::error::ApiError;

/// A part of the console, which the navigation names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Section {
    /// The list of clusters, and the pages of single clusters.
    Clusters,
    /// The list of tokens, and the pages of single tokens.
    Tokens,
    /// The event chains of the service and of clusters.
    Audit,
}

impl Section {
    /// Every section, in the order of the navigation.
    const ALL: [Section; 3] = [Section::Clusters, Section::Tokens, Section::Audit];

    fn path(self) -> &'static str {
        match self {
            Section::Clusters => "/clusters",
            Section::Tokens => "/tokens",
            Section::Audit => "/audit",
        }
    }

    fn label(self) -> &'static str {
        match self {
            Section::Clusters => "Clusters",
            Section::Tokens => "Tokens",
            Section::Audit => "Audit",
        }
    }

    fn action(self) -> Action {
        match self {
            Section::Clusters => Action::ListClusters,
            Section::Tokens => Action::ReadGrants,
            Section::Audit => Action::ReadEvents,
        }
    }
}

/// A link of the navigation.
pub(super) struct NavLink {
    pub(super) path: &'static str,
    pub(super) label: &'static str,
    pub(super) is_current: bool,
}

/// The admin who is signed in, as the frame shows them.
pub(super) struct VisitorLabel {
    pub(super) name: String,
    pub(super) roles: String,
}

/// Frame around a page.
pub(super) struct PageFrame {
    pub(super) title: String,
    pub(super) nav: Vec<NavLink>,
    pub(super) visitor: Option<VisitorLabel>,
    /// Path of the stream that says when the page has changed. `None` for a page that isn't live.
    pub(super) live: Option<String>,
    /// Time at which the page was made.
    pub(super) made: Option<ShownTime>,
    pub(super) style: &'static str,
    pub(super) script: &'static str,
    pub(super) icon: &'static str,
}

impl PageFrame {
    /// Makes the frame of a page for a browser that isn't signed in: it has no navigation.
    pub(super) fn without_visitor(title: impl Into<String>) -> Self {
        PageFrame {
            title: title.into(),
            nav: Vec::new(),
            visitor: None,
            live: None,
            made: None,
            style: assets::style_path(),
            script: assets::script_path(),
            icon: assets::icon_path(),
        }
    }

    /// Makes the frame of a page for a visitor. The navigation has the sections that the visitor
    /// may read.
    pub(super) fn new(
        app: &App,
        visitor: &Visitor,
        section: Section,
        title: impl Into<String>,
    ) -> Self {
        let readable = Section::ALL.into_iter().filter(|section| visitor.may(section.action()));
        let link =
            |of: Section| NavLink { path: of.path(), label: of.label(), is_current: of == section };
        let now_ms = app.clock.micros() / 1_000;
        PageFrame {
            nav: readable.map(link).collect(),
            visitor: Some(VisitorLabel { name: visitor.name.clone(), roles: visitor.role_names() }),
            made: Some(ShownTime::new(now_ms, now_ms)),
            ..PageFrame::without_visitor(title)
        }
    }

    /// Makes the page live, by the stream at `path`. `seen` is the number of wake-ups before the
    /// page was read. If this number has grown since, the stream begins with an event.
    pub(super) fn live(mut self, path: impl std::fmt::Display, seen: u64) -> Self {
        self.live = Some(format!("{path}?seen={seen}"));
        self
    }
}

/// Renders a page with status 200.
pub(super) fn render(page: &impl Template) -> Result<HttpResponse, ConsoleError> {
    let text =
        page.render().map_err(|error| ApiError::internal("The page can't be rendered.", &error))?;
    Ok(html(StatusCode::OK, text))
}

/// Makes the response with a page's text.
pub(super) fn html(status: StatusCode, text: String) -> HttpResponse {
    HttpResponse::build(status).content_type("text/html; charset=utf-8").body(text)
}
