//! The options of `bursar serve`: its own, and those of `vllm serve`.

use std::{env, net::IpAddr, path::PathBuf, time::Duration};

use bursar::{Bytes, serve::ServeOptions, serve::TlsFiles};
use bursar_budgets::ParseBytesError;
use clap::Args;

use super::text_of;
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
    /// Hugging Face checkpoint folder, GGUF file, model of the hub (`org/name` or `org/name@revision`), or `demo`. May
    /// be given several times; all models share the device under one ledger.
    #[arg(long, default_value = "demo")]
    model: Vec<String>,
    /// Name that clients use for a model: one per model, in order, or several for a single model. Replaces
    /// --model-name.
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

    /// File with API keys, one per line. Clients must send one of them. Without keys, every client is served.
    #[arg(long, value_name = "FILE", help_heading = "Clients")]
    api_key_file: Option<PathBuf>,
    /// API key. Other users of this machine can see it in the process list, so prefer --api-key-file.
    #[arg(long, value_name = "KEY", env = "VLLM_API_KEY", hide_env_values = true, help_heading = "Clients")]
    api_key: Vec<String>,
    /// Maximum size of a request body, including pictures in base64.
    #[arg(long, value_name = "BYTES", value_parser = bytes, help_heading = "Clients")]
    body_bytes: Option<Bytes>,
    /// Maximum concurrent connections. Further connections wait.
    #[arg(long, value_name = "N", help_heading = "Clients")]
    connections: Option<usize>,
    /// Maximum concurrent replies per key. Further requests are refused with status 429. By default, no limit.
    #[arg(long, value_name = "N", help_heading = "Clients")]
    streams_per_key: Option<usize>,
    /// Seconds that running replies may take to finish after the server is asked to stop.
    #[arg(long, value_name = "SECONDS", help_heading = "Clients")]
    drain: Option<u64>,
    /// Origin whose web pages may send requests, such as https://example.org, or `*` for all. May be given several
    /// times.
    #[arg(long, value_name = "ORIGIN", help_heading = "Clients")]
    allow_origin: Vec<String>,
    /// Certificates of the server, in PEM. Turns on TLS.
    #[arg(long, alias = "ssl-certfile", value_name = "FILE", requires = "tls_key", help_heading = "Clients")]
    tls_certificates: Option<PathBuf>,
    /// Private key of the first certificate, in PEM.
    #[arg(long, alias = "ssl-keyfile", value_name = "FILE", requires = "tls_certificates", help_heading = "Clients")]
    tls_key: Option<PathBuf>,

    /// Host that pictures may be fetched from, such as example.org or example.org:8443. May be given several times.
    #[arg(long, alias = "allowed-media-domains", value_name = "HOST", num_args = 1.., help_heading = "Pictures")]
    allow_url_host: Vec<String>,
    /// Allows these hosts to have private addresses, such as those of an internal network.
    #[arg(long, requires = "allow_url_host", help_heading = "Pictures")]
    allow_private_url_hosts: bool,
    /// Folder that `file:` URLs of pictures and videos may refer to. By default, no files are read.
    #[arg(long, alias = "allowed-local-media-path", value_name = "FOLDER", help_heading = "Pictures")]
    media_root: Option<PathBuf>,
    /// Program that decodes videos in MP4, MOV, WebM and MKV, or `none`. By default `ffmpeg`, if it is on the PATH.
    #[arg(long, value_name = "FILE|none", help_heading = "Pictures")]
    ffmpeg: Option<PathBuf>,

    /// Accepted from vLLM command lines and ignored: statistics are at /metrics.
    #[arg(long, hide = true)]
    disable_log_stats: bool,
    /// Accepted and ignored: tool calls use the model's own format, which its chat template determines.
    #[arg(long, hide = true)]
    enable_auto_tool_choice: bool,
    /// Accepted and ignored, as --enable-auto-tool-choice.
    #[arg(long, hide = true)]
    tool_call_parser: Option<String>,
    /// Accepted and ignored: the chat template determines the format of reasoning.
    #[arg(long, hide = true)]
    reasoning_parser: Option<String>,
    /// Accepted and ignored: the `priority` of a request always applies.
    #[arg(long, hide = true)]
    scheduling_policy: Option<String>,
    /// Accepted and ignored: no code of a checkpoint is executed.
    #[arg(long, hide = true)]
    trust_remote_code: bool,

    #[command(flatten)]
    knobs: KnobOptions,
}

fn bytes(typed: &str) -> Result<Bytes, String> {
    typed.parse().map_err(|error: ParseBytesError| error.to_string())
}

/// A model and the names that clients use for it.
pub struct Wanted {
    pub model: String,
    /// None: the model's own.
    pub names: Vec<String>,
}

impl Options {
    /// The models in order.
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

    pub fn knobs(&self) -> &KnobOptions {
        &self.knobs
    }

    /// What is logged of requests. Knobs that cannot be read are told of later.
    pub fn requests(&self) -> Requests {
        match self.knobs.knobs().is_ok_and(|knobs| knobs.disable_log_requests == Some(true)) {
            true => Requests::Nothing,
            false => Requests::Answered,
        }
    }

    /// The address as it is listened on.
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

    /// The limits of the server.
    pub fn serve(&self) -> Result<ServeOptions, Failure> {
        self.tell_taken();
        let usual = ServeOptions::default();
        let mut options = ServeOptions {
            body_bytes: self.body_bytes.unwrap_or(usual.body_bytes),
            connections: self.connections.unwrap_or(usual.connections),
            streams_per_key: self.streams_per_key,
            drain: self.drain.map_or(usual.drain, Duration::from_secs),
            url_hosts: self.allow_url_host.clone(),
            private_url_hosts: self.allow_private_url_hosts,
            media_root: self.media_root.clone(),
            ffmpeg: self.ffmpeg()?,
            origins: self.allow_origin.clone(),
            ..usual
        };
        if let Some(file) = &self.api_key_file {
            options = options.with_keys(&text_of(file)?)?;
        }
        if !self.api_key.is_empty() {
            options = options.with_keys(&self.api_key.join("\n"))?;
        }
        Ok(options)
    }

    /// The program that decodes films, as a whole path: it is run without an environment.
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

    /// Says which flags of vLLM have nothing to set here.
    fn tell_taken(&self) {
        let taken = [
            (self.disable_log_stats, "--disable-log-stats", "statistics are at /metrics"),
            (self.enable_auto_tool_choice, "--enable-auto-tool-choice", "models can call tools without it"),
            (self.tool_call_parser.is_some(), "--tool-call-parser", "the chat template determines the format"),
            (self.reasoning_parser.is_some(), "--reasoning-parser", "the chat template determines the format"),
            (self.scheduling_policy.is_some(), "--scheduling-policy", "priorities of requests always apply"),
            (self.trust_remote_code, "--trust-remote-code", "no code of a checkpoint is executed"),
        ];
        for (_, flag, why) in taken.into_iter().filter(|(is_set, ..)| *is_set) {
            logging::note(format_args!("note: {flag} has no effect: {why}"));
        }
    }
}
