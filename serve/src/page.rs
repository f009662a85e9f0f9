//! Web page at `/`, embedded in the binary: a chat and the memory of the device.

use axum::{
    http::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, X_CONTENT_TYPE_OPTIONS},
    response::IntoResponse,
};

/// Content security policy: nothing from other servers, nothing inline, and no embedding in frames.
const POLICY: &str = "default-src 'self'; img-src 'self' data: blob:; media-src data: blob:; style-src 'self'; script-src 'self'; \
                      connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'";

pub(super) async fn html() -> impl IntoResponse {
    file("text/html; charset=utf-8", include_str!("page/index.html"))
}

pub(super) async fn style() -> impl IntoResponse {
    file("text/css; charset=utf-8", include_str!("page/page.css"))
}

pub(super) async fn script() -> impl IntoResponse {
    file("text/javascript; charset=utf-8", include_str!("page/page.js"))
}

pub(super) async fn markdown() -> impl IntoResponse {
    file("text/javascript; charset=utf-8", include_str!("page/markdown.js"))
}

/// Returns a file that browsers must revalidate before each use, because another version of the
/// server has another page.
fn file(kind: &'static str, text: &'static str) -> impl IntoResponse {
    let headers = [
        (CONTENT_TYPE, kind),
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (CACHE_CONTROL, "no-cache"),
    ];
    (headers, text)
}
