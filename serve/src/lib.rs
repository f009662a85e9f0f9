//! HTTP server with OpenAI's and Anthropic's APIs over a [`Runtime`](bursar::Runtime), as
//! used by `bursar serve`.
//!
//! This crate only translates between HTTP and [`Chat`](bursar::Chat). The runtime decides on
//! limits, order and memory. [`Service::router`] returns an [`axum::Router`] to merge with your own
//! routes; a [`Server`] adds a listener.
//!
//! ```no_run
//! use bursar::{ModelSource, Runtime, RuntimeConfig};
//! use bursar_serve::{ServeOptions, Service};
//!
//! # #[tokio::main]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let runtime = Runtime::start(RuntimeConfig::default()).await?;
//! let service = Service::new(&runtime, ServeOptions::default());
//! service.add(["demo"], runtime.load(ModelSource::demo()).await?);
//! let app = axum::Router::new().route("/mine", axum::routing::get(|| async { "hello" })).merge(service.router());
//! axum::serve(tokio::net::TcpListener::bind("127.0.0.1:8000").await?, app).await?;
//! # Ok(())
//! # }
//! ```

#![deny(missing_docs)]
#![warn(clippy::match_bool)]

mod access;
mod anthropic;
mod body;
mod client_names;
mod connection_slots;
mod data_uri;
mod effort;
mod error;
mod fetch;
mod ffmpeg;
mod form;
mod guard;
mod half_closed;
mod header_params;
mod health;
mod id;
mod lenient;
mod listen;
mod media;
mod memory;
mod models;
mod one_or_many;
mod openai;
mod openapi;
mod options;
mod other_process;
mod page;
mod picture_reader;
mod query;
mod request_message;
mod root_path;
mod routes;
mod sleep;
mod sse;
mod state;
mod tokens;
mod tool;
mod video;
mod vllm_series;
mod write_timeout;

pub use access::ACCESS_LOG;
pub use listen::{ListenError, Server, TlsFiles};
pub use models::ModelState;
pub use options::{KeyError, ServeOptions};
pub use picture_reader::{PictureReadError, ReadPictures};
pub use state::Service;
