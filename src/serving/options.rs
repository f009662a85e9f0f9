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
    /// A model, as after --model.
    #[arg(value_name = "MODEL", conflicts_with = "model")]
    sole: Option<String>,
    /// A Hugging Face checkpoint folder, a GGUF file, a model of the hub (`org/name` or `org/name@revision`), or
    /// `demo`. May be given several times: all share the device under one ledger.
    #[arg(long, default_value = "demo")]
    model: Vec<String>,
    /// The name that clients use, of each model in order, or several names of a single one: in place of --model-name.
    #[arg(long, value_name = "NAME", num_args = 1..)]
    name: Vec<String>,
    /// The address to listen on. Port 0 takes any free one.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8000", conflicts_with_all = ["host", "port"])]
    listen: String,
    /// The address without the port, as in vLLM.
    #[arg(long, value_name = "HOST")]
    host: Option<String>,
    /// The port without the address, as in vLLM.
    #[arg(long, value_name = "PORT")]
    port: Option<u16>,

    /// A file of keys, one a line, of which clients send one. Without it everybody is served.
    #[arg(long, value_name = "FILE", help_heading = "Clients")]
    api_key_file: Option<PathBuf>,
    /// A key. Other users of this machine can read it in the list of processes: prefer a file.
    #[arg(long, value_name = "KEY", env = "VLLM_API_KEY", hide_env_values = true, help_heading = "Clients")]
    api_key: Vec<String>,
    /// The largest request, pictures in base64 included.
    #[arg(long, value_name = "BYTES", value_parser = bytes, help_heading = "Clients")]
    body_bytes: Option<Bytes>,
    /// Connections at once; more wait.
    #[arg(long, value_name = "N", help_heading = "Clients")]
    connections: Option<usize>,
    /// Replies at once for each key; more are refused with 429.
    #[arg(long, value_name = "N", help_heading = "Clients")]
    streams_per_key: Option<usize>,
    /// Seconds that running replies may take after the server is asked to stop.
    #[arg(long, value_name = "SECONDS", help_heading = "Clients")]
    drain: Option<u64>,
    /// A web page's origin that may ask, such as https://example.org, or `*`.
    #[arg(long, value_name = "ORIGIN", help_heading = "Clients")]
    allow_origin: Vec<String>,
    /// The server's certificates, in PEM: it speaks TLS.
    #[arg(long, alias = "ssl-certfile", value_name = "FILE", requires = "tls_key", help_heading = "Clients")]
    tls_certificates: Option<PathBuf>,
    /// The certificate's key, in PEM.
    #[arg(long, alias = "ssl-keyfile", value_name = "FILE", requires = "tls_certificates", help_heading = "Clients")]
    tls_key: Option<PathBuf>,

    /// A host that pictures may be fetched from, such as example.org or example.org:8443. May be given several times.
    #[arg(long, alias = "allowed-media-domains", value_name = "HOST", num_args = 1.., help_heading = "Pictures")]
    allow_url_host: Vec<String>,
    /// These hosts may have private addresses, for example in a company's internal network.
    #[arg(long, requires = "allow_url_host", help_heading = "Pictures")]
    allow_private_url_hosts: bool,
    /// The folder that `file:` URLs of pictures and films may name files of.
    #[arg(long, alias = "allowed-local-media-path", value_name = "FOLDER", help_heading = "Pictures")]
    media_root: Option<PathBuf>,
    /// The program that decodes films in MP4, MOV, WebM and MKV, or `none`. By default `ffmpeg`, if it is on the PATH.
    #[arg(long, value_name = "FILE|none", help_heading = "Pictures")]
    ffmpeg: Option<PathBuf>,

    /// Taken for command lines of vLLM: statistics are at /metrics.
    #[arg(long, hide = true)]
    disable_log_stats: bool,
    /// Accepted and ignored: tool calls use the model's own format, which its chat template determines.
    #[arg(long, hide = true)]
    enable_auto_tool_choice: bool,
    /// Likewise.
    #[arg(long, hide = true)]
    tool_call_parser: Option<String>,
    /// Likewise.
    #[arg(long, hide = true)]
    reasoning_parser: Option<String>,
    /// Likewise: `priority` is always heard.
    #[arg(long, hide = true)]
    scheduling_policy: Option<String>,
    /// Likewise: nothing of a checkpoint is run.
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
                error: format!("there are {} models and {} names", models.len(), self.name.len()),
                hint: "give each model one `--name`, or none at all".to_owned(),
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
                error: format!("--ffmpeg {}: there is no such file", named.display()),
                hint: "name the program itself, such as /usr/bin/ffmpeg".to_owned(),
            }),
        }
    }

    /// Says which flags of vLLM have nothing to set here.
    fn tell_taken(&self) {
        let taken = [
            (self.disable_log_stats, "--disable-log-stats", "statistics are at /metrics"),
            (self.enable_auto_tool_choice, "--enable-auto-tool-choice", "models call tools without it"),
            (self.tool_call_parser.is_some(), "--tool-call-parser", "the chat template determines the format"),
            (self.reasoning_parser.is_some(), "--reasoning-parser", "the chat template determines the format"),
            (self.scheduling_policy.is_some(), "--scheduling-policy", "the priorities of requests are always heard"),
            (self.trust_remote_code, "--trust-remote-code", "nothing of a checkpoint is run"),
        ];
        for (_, flag, why) in taken.into_iter().filter(|(is_set, ..)| *is_set) {
            logging::note(format_args!("note: {flag} changes nothing: {why}"));
        }
    }
}
