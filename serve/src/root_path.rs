//! Path prefix of a server whose proxy does not strip it.

use axum::{
    Router,
    extract::{RawQuery, Request},
    http::{Uri, uri::PathAndQuery},
    response::Redirect,
    routing::get,
};
use tower::ServiceExt;

/// Serves `routes` also under the prefix `/{root}`.
pub(super) fn below(root: &str, routes: Router) -> Router {
    if root.is_empty() {
        return routes;
    }
    let prefix = format!("/{root}");
    // Links of the page are relative to a path with a trailing slash.
    let folder = format!("{prefix}/");
    let redirect = async move |RawQuery(query): RawQuery| {
        let query = query.map(|query| format!("?{query}")).unwrap_or_default();
        Redirect::temporary(&(folder + &query))
    };
    let page = Router::new().route(&prefix, get(redirect));
    let stripped = routes.map_request(move |mut request: Request| {
        if let Some(uri) = without(&prefix, request.uri()) {
            *request.uri_mut() = uri;
        }
        request
    });
    page.fallback_service(stripped)
}

/// The URI without the path prefix. `None` if its path does not begin with the prefix and a slash.
fn without(prefix: &str, uri: &Uri) -> Option<Uri> {
    let rest = uri.path_and_query()?.as_str().strip_prefix(prefix).filter(|rest| rest.starts_with('/'))?;
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = Some(PathAndQuery::try_from(rest).ok()?);
    Uri::from_parts(parts).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_path_is_removed_only_as_whole_segments() {
        for (uri, rest) in [
            ("/llm/v1/models?limit=1", Some("/v1/models?limit=1")),
            ("/llm/", Some("/")),
            ("http://host/llm/v1", Some("http://host/v1")),
            ("/llm", None),
            ("/llms/v1", None),
            ("/v1/llm/", None),
        ] {
            let found = without("/llm", &uri.parse().expect("an address"));
            assert_eq!(found.map(|uri| uri.to_string()).as_deref(), rest, "{uri}");
        }
    }
}
