//! The options of `bursar serve`, including options of `vllm serve`.

use std::{
    env, fs,
    net::IpAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use bursar::{Bytes, LoadOptions, ModelSource, knobs::SamplingDefaults};
use bursar_budgets::ParseBytesError;
use bursar_serve::{ServeOptions, TlsFiles};
use clap::{Args, ValueEnum};
use serde_json::{Map, Value};

use super::vllm_flags::VllmFlags;
use crate::{
    failure::Failure,
    knobs::KnobOptions,
    logging::{self, Requests},
};

/// Options of `bursar serve`.
#[derive(Args)]
pub struct Options {
    /// Model to serve, as in --model.
    #[arg(value_name = "MODEL", conflicts_with = "model")]
    sole: Option<String>,
    /// Hugging Face checkpoint folder, GGUF file, model of the hub (`org/name` or
    /// `org/name@revision`), or `demo`. May be given several times; all models share the
    /// device under one ledger.
    #[arg(long, default_value = "demo")]
    model: Vec<String>,
    /// Name that clients use for a model: one per model, in order, or several for a
    /// single model. Replaces --model-name.
    #[arg(long, value_name = "NAME", num_args = 1..)]
    name: Vec<String>,
    /// Address to listen on. Port 0 picks a free port.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8000", conflicts_with_all = ["host", "port"])]
    listen: String,
    /// Address to listen on without the port, as in vLLM. Default 127.0.0.1.
    #[arg(long, value_name = "HOST")]
    host: Option<String>,
    /// Port to listen on without the address, as in vLLM. Default 8000.
    #[arg(long, value_name = "PORT")]
    port: Option<u16>,

    /// File with API keys, one per line. Clients must send one of them. Without keys,
    /// every client is served.
    #[arg(long, value_name = "FILE", help_heading = "Clients")]
    api_key_file: Option<PathBuf>,
    /// API key. Other users of this machine can see it in the process
    /// list, so prefer --api-key-file.
    #[arg(long, value_name = "KEY", env = "VLLM_API_KEY", hide_env_values = true, help_heading = "Clients")]
    api_key: Vec<String>,
    /// File with administrator keys, one per line. Administrators may also put models to sleep,
    /// wake them, run memory drills and read the budget of a server with several API keys. Without
    /// this file, every client is an administrator if the server has no API keys and listens only
    /// on this machine; otherwise no client is.
    #[arg(long, value_name = "FILE", help_heading = "Clients")]
    admin_key_file: Option<PathBuf>,
    /// Makes every client an administrator.
    #[arg(long, conflicts_with = "admin_key_file", help_heading = "Clients")]
    open_admin: bool,
    /// Maximum size of a request body, including pictures in base64.
    #[arg(long, value_name = "BYTES", value_parser = bytes, help_heading = "Clients")]
    body_bytes: Option<Bytes>,
    /// Maximum concurrent connections. Connections above the limit get status 503 for everything
    /// except health and metrics.
    #[arg(long, value_name = "N", help_heading = "Clients")]
    connections: Option<usize>,
    /// Maximum concurrent connections from one IPv4 address or one IPv6 /64 network.
    /// Default: half of --connections.
    #[arg(long, value_name = "N", help_heading = "Clients")]
    connections_per_address: Option<usize>,
    /// Maximum concurrent replies per key. Further requests are refused with status 429.
    /// By default, no limit.
    #[arg(long, value_name = "N", help_heading = "Clients")]
    streams_per_key: Option<usize>,
    /// Seconds that running replies may take to finish after the server is asked to stop.
    #[arg(long, alias = "shutdown-timeout", value_name = "SECONDS", help_heading = "Clients")]
    drain: Option<u64>,
    /// Path prefix, such as `/llm`, that a proxy in front of the server does not remove. Paths
    /// without the prefix are served too.
    #[arg(long, value_name = "PATH", default_value = "", hide_default_value = true, help_heading = "Clients")]
    root_path: String,
    /// Origin whose web pages may send requests, such as https://example.org, or `*` for all. May
    /// be given several times.
    #[arg(long, alias = "allowed-origins", value_name = "ORIGIN", help_heading = "Clients")]
    allow_origin: Vec<String>,
    /// Metric names at /metrics: `bursar`, or `vllm`, which also exports the metrics
    /// that vLLM's dashboards read.
    #[arg(long, value_name = "NAMES", value_enum, default_value_t, help_heading = "Clients")]
    metrics_names: MetricsNames,
    /// Certificates of the server, in PEM. Turns on TLS.
    #[arg(long, alias = "ssl-certfile", value_name = "FILE", requires = "tls_key", help_heading = "Clients")]
    tls_certificates: Option<PathBuf>,
    /// Private key of the first certificate, in PEM.
    #[arg(long, alias = "ssl-keyfile", value_name = "FILE", requires = "tls_certificates", help_heading = "Clients")]
    tls_key: Option<PathBuf>,

    /// Host that pictures may be fetched from, such as example.org or example.org:8443. May
    /// be given several times.
    #[arg(long, alias = "allowed-media-domains", value_name = "HOST", num_args = 1.., help_heading = "Pictures")]
    allow_url_host: Vec<String>,
    /// Allows the hosts of --allow-url-host to have private addresses, such as those of an internal
    /// network.
    #[arg(long, requires = "allow_url_host", help_heading = "Pictures")]
    allow_private_url_hosts: bool,
    /// Folder that `file:` URLs of pictures and videos may refer to. By default, no files are read.
    #[arg(long, alias = "allowed-local-media-path", value_name = "FOLDER", help_heading = "Pictures")]
    media_root: Option<PathBuf>,
    /// Program that decodes videos in MP4, MOV, WebM and MKV, or `none`. By default `ffmpeg`, if it
    /// is on the PATH.
    #[arg(long, value_name = "FILE|none", help_heading = "Pictures")]
    ffmpeg: Option<PathBuf>,

    /// Folder with a tokenizer and its chat templates, instead of those of the checkpoint.
    #[arg(long, value_name = "FOLDER", help_heading = "Replies")]
    tokenizer: Option<PathBuf>,
    /// Jinja file, or the text of a template, instead of the chat template of the tokenizer.
    #[arg(long, value_name = "FILE", help_heading = "Replies")]
    chat_template: Option<String>,
    /// JSON object of variables for chat templates. A
    /// request's `chat_template_kwargs` override them.
    #[arg(long, value_name = "JSON", value_parser = object, help_heading = "Replies")]
    default_chat_template_kwargs: Option<Map<String, Value>>,
    /// Default sampling parameters: `auto` reads the checkpoint's generation_config.json, and
    /// `vllm` ignores that file and uses temperature 1. Without the file, both are the same.
    #[arg(long, value_enum, default_value_t, help_heading = "Replies")]
    generation_config: GenerationConfig,

    /// Branch, tag or commit of Hugging Face models that are named without `@revision`.
    #[arg(long, value_name = "NAME", help_heading = "Hub")]
    revision: Option<String>,
    /// Folder of the Hugging Face cache. By default, the cache that all Hugging Face tools share.
    #[arg(long, value_name = "FOLDER", help_heading = "Hub")]
    download_dir: Option<PathBuf>,
    /// Hugging Face token for private and gated models. Other users of this machine can see it in
    /// the process list, so prefer the environment variable HF_TOKEN.
    #[arg(long, value_name = "TOKEN", help_heading = "Hub")]
    hf_token: Option<String>,

    #[command(flatten)]
    vllm: VllmFlags,
    #[command(flatten)]
    knobs: KnobOptions,
}

/// How a checkpoint's generation_config.json is used.
#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum GenerationConfig {
    #[default]
    Auto,
    Vllm,
}

/// The naming scheme of exported metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum MetricsNames {
    #[default]
    Bursar,
    Vllm,
}

fn object(typed: &str) -> Result<Map<String, Value>, String> {
    serde_json::from_str(typed).map_err(|error| format!("expected a JSON object: {error}"))
}

fn bytes(typed: &str) -> Result<Bytes, String> {
    typed.parse().map_err(|error: ParseBytesError| error.to_string())
}

/// Raises this process's limit of open files as far as allowed, and returns how many of the wanted
/// `connections` fit below this limit.
fn descriptors_for(connections: usize) -> usize {
    /// Descriptors that are reserved for files, sockets to other servers, and the runtime itself.
    const OTHERS: u64 = 256;
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    // macOS refuses the maximum that it reports, but accepts this value.
    const USUAL: Option<u64> = Some(10_240);
    let raised = [limit.maximum, USUAL]
        .into_iter()
        .find(|&current| setrlimit(Resource::Nofile, Rlimit { current, ..limit }).is_ok());
    let current = raised.unwrap_or(limit.current);
    let fit = current.map_or(usize::MAX, |files| files.saturating_sub(OTHERS.min(files / 2)).max(1) as usize);
    if fit < connections {
        logging::note(format_args!(
            "warning: the limit of open files allows {fit} concurrent connections instead of {connections}; raise it with \
             `ulimit -Hn`"
        ));
    }
    connections.min(fit)
}

/// A model and the names that clients use for it.
pub struct Wanted {
    pub model: String,
    /// The names that clients use. Empty to use the model's own name.
    pub names: Vec<String>,
}

impl Options {
    /// Returns the models to serve, in order.
    pub fn models(&self) -> Result<Vec<Wanted>, Failure> {
        let models: Vec<&String> = self.sole.as_ref().map_or_else(|| self.model.iter().collect(), |sole| vec![sole]);
        if let [model] = models[..] {
            return Ok(vec![Wanted { model: model.clone(), names: self.name.clone() }]);
        }
        if !self.name.is_empty() && self.name.len() != models.len() {
            return Err(Failure {
                error: format!("--name is given {} times for {} models", self.name.len(), models.len()),
                hint: "give one `--name` per model, or none".to_owned(),
            });
        }
        let names = self.name.iter().map(|name| vec![name.clone()]).chain(std::iter::repeat(Vec::new()));
        let wanted: Vec<_> =
            models.into_iter().zip(names).map(|(model, names)| Wanted { model: model.clone(), names }).collect();
        Ok(wanted)
    }

    /// Returns the options to load a model with: this command's options on top of the knobs in
    /// `base`.
    ///
    /// # Errors
    /// The file of the chat template cannot be read, or the folder of the tokenizer does not exist.
    pub fn load(&self, base: LoadOptions) -> Result<LoadOptions, Failure> {
        let sampling_defaults = match self.generation_config {
            GenerationConfig::Auto => SamplingDefaults::Vllm,
            GenerationConfig::Vllm => SamplingDefaults::Ignored,
        };
        let chat_template = match &self.chat_template {
            Some(text) if text.contains("{%") || text.contains("{{") => Some(text.clone()),
            Some(file) => Some(text_of(Path::new(file))?),
            None => None,
        };
        if let Some(folder) = self.tokenizer.as_ref().filter(|folder| !folder.is_dir()) {
            return Err(Failure {
                error: format!("--tokenizer {}: no such folder", folder.display()),
                hint: "download the tokenizer's files, such as tokenizer.json, and give their folder".to_owned(),
            });
        }
        Ok(LoadOptions { sampling_defaults, tokenizer: self.tokenizer.clone(), chat_template, ..base })
    }

    /// Returns the source of `model`, which is given as typed on the command line. The source has
    /// this command's hub settings.
    pub fn source(&self, model: &str) -> ModelSource {
        let mut hub = crate::hub::options();
        hub.revision = self.revision.clone().or(hub.revision);
        hub.cache = self.download_dir.clone().or(hub.cache);
        hub.token = self.hf_token.clone().or(hub.token);
        crate::model::source_of(model, hub)
    }

    /// Returns all allowed origins. A value may be a JSON list of origins, as in vLLM.
    fn origins(&self) -> Vec<String> {
        let of = |typed: &String| serde_json::from_str(typed).unwrap_or_else(|_| vec![typed.clone()]);
        self.allow_origin.iter().flat_map(of).collect()
    }

    pub fn knobs(&self) -> &KnobOptions {
        &self.knobs
    }

    /// Returns how much is logged about requests. Ignores knobs that cannot be parsed, which are
    /// reported later.
    pub fn requests(&self) -> Requests {
        if self.knobs.knobs().is_ok_and(|knobs| knobs.disable_log_requests == Some(true)) {
            Requests::Nothing
        } else {
            Requests::Answered
        }
    }

    /// Returns the address to listen on, with the port.
    pub fn address(&self) -> String {
        let Some(host) = self.host.clone().or_else(|| self.port.map(|_| "127.0.0.1".to_owned())) else {
            return self.listen.clone();
        };
        let port = self.port.unwrap_or(8000);
        match host.parse() {
            Ok(IpAddr::V6(host)) => format!("[{host}]:{port}"),
            _ => format!("{host}:{port}"),
        }
    }

    pub fn tls(&self) -> Option<TlsFiles> {
        let (certificates, key) = self.tls_certificates.clone().zip(self.tls_key.clone())?;
        Some(TlsFiles { certificates, key })
    }

    /// Returns the options of the server.
    pub fn serve(&self) -> Result<ServeOptions, Failure> {
        self.vllm.check()?;
        let usual = ServeOptions::default();
        let connections = descriptors_for(self.connections.unwrap_or(usual.connections));
        let mut options = ServeOptions {
            body_bytes: self.body_bytes.unwrap_or(usual.body_bytes),
            connections,
            connections_per_address: self.connections_per_address.unwrap_or(connections.div_ceil(2)),
            open_admin: self.open_admin,
            streams_per_key: self.streams_per_key,
            drain: self.drain.map_or(usual.drain, Duration::from_secs),
            url_hosts: self.allow_url_host.clone(),
            private_url_hosts: self.allow_private_url_hosts,
            media_root: self.media_root.clone(),
            ffmpeg: self.ffmpeg()?,
            origins: self.origins(),
            root_path: self.root_path.trim_matches('/').to_owned(),
            vllm_metrics: self.metrics_names == MetricsNames::Vllm,
            template_variables: self.default_chat_template_kwargs.clone().unwrap_or_default(),
            ..usual
        };
        if let Some(file) = &self.api_key_file {
            options = options.with_keys(&text_of(file)?)?;
        }
        if let Some(file) = &self.admin_key_file {
            options = options.with_admin_keys(&text_of(file)?)?;
        }
        if !self.api_key.is_empty() {
            options = options.with_keys(&self.api_key.join("\n"))?;
        }
        Ok(options)
    }

    /// Returns the absolute path of the program that decodes videos. The path must be absolute
    /// because the program runs without environment variables.
    fn ffmpeg(&self) -> Result<Option<PathBuf>, Failure> {
        let Some(named) = &self.ffmpeg else {
            let path = env::var_os("PATH").unwrap_or_default();
            return Ok(env::split_paths(&path).map(|folder| folder.join("ffmpeg")).find(|program| program.is_file()));
        };
        if named.as_os_str() == "none" {
            return Ok(None);
        }
        match named.canonicalize() {
            Ok(program) if program.is_file() => Ok(Some(program)),
            _ => Err(Failure {
                error: format!("--ffmpeg {}: no such file", named.display()),
                hint: "give the path of the program, such as /usr/bin/ffmpeg".to_owned(),
            }),
        }
    }
}

/// Reads a text file. A failure names the file.
fn text_of(file: &Path) -> Result<String, Failure> {
    fs::read_to_string(file).map_err(|error| Failure {
        error: format!("{}: {error}", file.display()),
        hint: "name a readable text file".to_owned(),
    })
}
