//! Command line options of a worker.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use bursar::{BlasSearch, Bytes, DeviceChoice, HubModel, LoadOptions, ModelSource, RuntimeConfig, knobs::Knobs};
use bursar_serve::ServeOptions;
use clap::Parser;
use dynamo_backend_common::{CommonArgs, DisaggregationMode, WorkerConfig};

/// A worker of NVIDIA Dynamo that serves a model of Bursar.
#[derive(Clone, Debug, Parser)]
#[command(name = "bursar-dynamo", version)]
pub struct Options {
    /// A Hugging Face checkpoint folder, or a model of the hub (`org/name`). Dynamo reads
    /// its tokenizer and chat template. `demo` is for tests: this model is embedded in the
    /// program, where Dynamo cannot read its files.
    #[arg(long)]
    pub model: String,
    /// The name that clients use. By default the model's own name.
    #[arg(long, value_name = "NAME")]
    pub served_model_name: Option<String>,
    /// The device: auto (the first GPU, or host memory if there is none), host, or cuda:N.
    #[arg(long, default_value = "auto", value_parser = ["auto", "host", "cuda:0", "cuda:1", "cuda:2", "cuda:3", "cuda:4", "cuda:5", "cuda:6", "cuda:7"])]
    pub device: String,
    /// Size of the host memory that is used instead of a GPU's memory.
    #[arg(long, default_value = "512MiB", value_parser = bytes)]
    pub capacity: Bytes,
    /// The folder with libcublasLt, if it is not in a usual place.
    #[arg(long, value_name = "FOLDER", env = "BURSAR_CUDA_LIB")]
    pub cuda_lib: Option<PathBuf>,
    /// The folder where profiles of starts are recorded, which make later starts faster.
    #[arg(long, value_name = "FOLDER")]
    pub profile_cache: Option<PathBuf>,
    /// A knob of docs/knobs.md, by any of its names, such as `max_model_len=8192`. May
    /// be given several times.
    #[arg(long, value_name = "NAME=VALUE")]
    pub knob: Vec<String>,
    /// A host that pictures may be fetched from, such as example.org. May be given several times.
    #[arg(long, value_name = "HOST")]
    pub allow_url_host: Vec<String>,
    /// Allow the hosts of `--allow-url-host` to have private addresses.
    #[arg(long, requires = "allow_url_host")]
    pub allow_private_url_hosts: bool,
    /// The folder with the files that `file:` URLs of pictures may name.
    #[arg(long, value_name = "FOLDER")]
    pub media_root: Option<PathBuf>,
    /// Seconds that running replies may take after the worker is ordered to end or to sleep.
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub drain: u64,
    #[command(flatten)]
    pub common: CommonArgs,
}

fn bytes(typed: &str) -> Result<Bytes, String> {
    typed.parse().map_err(|error: bursar::ParseBytesError| error.to_string())
}

impl Options {
    /// Returns the configuration for Dynamo.
    ///
    /// # Errors
    /// Returns an error if the role is not an aggregated worker.
    pub fn worker_config(&self) -> anyhow::Result<WorkerConfig> {
        let common = &self.common;
        if common.disaggregation_mode != DisaggregationMode::Aggregated || common.route_to_encoder {
            anyhow::bail!(
                "Bursar computes prompts, pictures and replies in one worker; use `--disaggregation-mode agg`"
            );
        }
        Ok(WorkerConfig {
            namespace: common.namespace.clone(),
            component: common.component.clone(),
            endpoint: common.endpoint.clone(),
            endpoint_types: common.endpoint_types.clone(),
            custom_jinja_template: common.custom_jinja_template.clone(),
            tool_call_parser: common.dyn_tool_call_parser.clone(),
            reasoning_parser: common.dyn_reasoning_parser.clone(),
            exclude_tools_when_tool_choice_none: common.exclude_tools_when_tool_choice_none,
            model_name: if self.model == "demo" { String::new() } else { self.model.clone() },
            served_model_name: self.served_model_name.clone(),
            runtime: common.runtime.clone(),
            enable_rl: common.enable_rl,
            ..WorkerConfig::default()
        })
    }

    pub(crate) fn source(&self) -> ModelSource {
        match self.model.as_str() {
            "demo" => ModelSource::demo(),
            folder if Path::new(folder).exists() => ModelSource::folder(folder),
            id if HubModel::is_id(id) => ModelSource::hub(id),
            folder => ModelSource::folder(folder),
        }
    }

    /// Returns the load options of the model.
    ///
    /// # Errors
    /// Returns an error if a knob is unknown or has a bad value.
    pub(crate) fn load(&self) -> anyhow::Result<LoadOptions> {
        let settings: anyhow::Result<Vec<_>> = self.knob.iter().map(|typed| setting(typed)).collect();
        let (knobs, names) = Knobs::named_from(settings?)?;
        let blas = BlasSearch::usual().first_in(self.cuda_lib.as_slice());
        let name = self.served_model_name.clone();
        let base = LoadOptions { name, blas, profiles: self.profile_cache.clone(), ..LoadOptions::default() };
        Ok(LoadOptions { names, ..knobs.over(base)? })
    }

    pub(crate) fn runtime(&self) -> RuntimeConfig {
        let device = match self.device.as_str() {
            "auto" => DeviceChoice::Auto(self.capacity),
            "host" => DeviceChoice::Host(self.capacity),
            named => DeviceChoice::Cuda(named.trim_start_matches("cuda:").parse().unwrap_or(0)),
        };
        RuntimeConfig { device, ..RuntimeConfig::default() }
    }

    /// Returns the options for reading pictures. The rules are the same as in `bursar serve`.
    pub(crate) fn pictures(&self) -> ServeOptions {
        ServeOptions {
            url_hosts: self.allow_url_host.clone(),
            private_url_hosts: self.allow_private_url_hosts,
            media_root: self.media_root.clone(),
            ..ServeOptions::default()
        }
    }

    pub(crate) fn drain(&self) -> Duration {
        Duration::from_secs(self.drain)
    }
}

/// Parses `NAME=VALUE`. A value that is not JSON is used as text.
fn setting(typed: &str) -> anyhow::Result<(String, serde_json::Value)> {
    let (name, value) = typed.split_once('=').ok_or_else(|| anyhow::anyhow!("`{typed}` is not NAME=VALUE"))?;
    let value = serde_json::from_str(value).unwrap_or_else(|_| value.into());
    Ok((name.to_owned(), value))
}
