//! Opening a checkpoint: every file parsed and checked, the weights mapped but not read.

use serde_json::Value;

use super::checkpoint_files::CheckpointSource;
use super::fingerprint::CheckpointFingerprint;
use super::tensors::{TensorIndex, TensorInfo};
use crate::error::CheckpointError;
use crate::processor::{ImageProcessor, ImageProcessorConfig, VideoProcessor};
use crate::sampling::GenerationDefaults;
use crate::text::template_source::TemplateFiles;
use crate::text::{ChatTemplate, PromptEncoder, TemplateLimits, TemplateSources, Tokenizer};

/// A checkpoint, open.
#[derive(Debug)]
pub struct Checkpoint {
    /// `config.json` as it is: families read it themselves.
    pub config: Value,
    /// `generation_config.json`, with what stands in `config.json` for end tokens when it is absent.
    pub generation: GenerationDefaults,
    /// `preprocessor_config.json`; absent for models without pictures.
    pub image_processor: Option<ImageProcessor>,
    /// `video_preprocessor_config.json`, or `preprocessor_config.json` where there is no such file, as transformers reads
    /// it; absent for models without pictures.
    pub video_processor: Option<VideoProcessor>,
    /// `tokenizer.json` and the chat templates.
    pub prompts: PromptEncoder,
    /// All weights.
    pub tensors: TensorIndex,
    source: CheckpointSource,
    fingerprint: CheckpointFingerprint,
    config_fingerprint: CheckpointFingerprint,
}

impl Checkpoint {
    /// Opens and checks a checkpoint. No weight is read.
    ///
    /// # Errors
    /// [`CheckpointError`]: a file that is missing, damaged or hostile.
    pub fn open(source: CheckpointSource) -> Result<Self, CheckpointError> {
        let config_json = source.require("config.json")?;
        let config: Value = serde_json::from_slice(&config_json)
            .map_err(|error| CheckpointError::Malformed { file: "config.json".into(), reason: error.to_string() })?;
        if !config.is_object() {
            return Err(CheckpointError::Malformed {
                file: "config.json".into(),
                reason: "it is not a JSON object".into(),
            });
        }
        let generation_json = source.read("generation_config.json")?;
        let processor_json = source.read("preprocessor_config.json")?;
        let video_json = source.read("video_preprocessor_config.json")?;
        let tokenizer_json = source.require("tokenizer.json")?;
        let tokenizer_config = source.read("tokenizer_config.json")?;
        let template_jinja = source.read("chat_template.jinja")?;
        let template_json = source.read("chat_template.json")?;
        let tensors = TensorIndex::open(&source)?;
        let fingerprint = CheckpointFingerprint::new(
            &[
                ("config.json", Some(&config_json)),
                ("generation_config.json", generation_json.as_deref()),
                ("preprocessor_config.json", processor_json.as_deref()),
                ("video_preprocessor_config.json", video_json.as_deref()),
                ("tokenizer.json", Some(&tokenizer_json)),
                ("tokenizer_config.json", tokenizer_config.as_deref()),
                ("chat_template.jinja", template_jinja.as_deref()),
                ("chat_template.json", template_json.as_deref()),
            ],
            tensors.shards(),
        );
        let config_fingerprint = CheckpointFingerprint::new(&[("config.json", Some(&config_json))], &[]);
        let templates = TemplateSources::read(TemplateFiles {
            jinja: template_jinja.as_deref(),
            json: template_json.as_deref(),
            tokenizer_config: tokenizer_config.as_deref(),
        })?;
        let template = ChatTemplate::new(templates, TemplateLimits::default())?;
        let video_settings = video_json.as_deref().or(processor_json.as_deref());
        let video_processor =
            video_settings.map(|json| VideoProcessor::new(ImageProcessorConfig::from_video_json(json)?)).transpose()?;
        let image_processor = processor_json
            .as_deref()
            .map(|json| ImageProcessor::new(ImageProcessorConfig::from_json(json)?))
            .transpose()?;
        Ok(Checkpoint {
            generation: generation_defaults(generation_json.as_deref(), &config)?,
            prompts: PromptEncoder::new(Tokenizer::from_bytes(&tokenizer_json)?, template),
            config,
            image_processor,
            video_processor,
            tensors,
            source,
            fingerprint,
            config_fingerprint,
        })
    }

    /// Where it was opened from.
    pub fn source(&self) -> &CheckpointSource {
        &self.source
    }

    /// `model_type` of `config.json`, "qwen2_5_vl" for example.
    pub fn model_type(&self) -> Option<&str> {
        self.config.get("model_type")?.as_str()
    }

    /// `architectures` of `config.json`, "Qwen2_5_VLForConditionalGeneration" for example.
    pub fn architectures(&self) -> impl Iterator<Item = &str> {
        self.config.get("architectures").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str)
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        self.prompts.tokenizer()
    }

    /// A tensor by its name.
    ///
    /// # Errors
    /// As [`TensorIndex::tensor`].
    pub fn tensor(&self, name: &str) -> Result<TensorInfo<'_>, CheckpointError> {
        self.tensors.tensor(name)
    }

    /// Over all settings and the shape of the weights.
    pub fn fingerprint(&self) -> CheckpointFingerprint {
        self.fingerprint
    }

    /// Over `config.json` alone. What a profile measures follows from this, from
    /// [`weights_fingerprint`](Self::weights_fingerprint) and from the processors' settings, and not from templates and
    /// vocabularies.
    pub fn config_fingerprint(&self) -> CheckpointFingerprint {
        self.config_fingerprint
    }

    /// Over the names, types, shapes and places of the weights.
    pub fn weights_fingerprint(&self) -> CheckpointFingerprint {
        CheckpointFingerprint::new(&[], self.tensors.shards())
    }
}

/// Older checkpoints have their end tokens in `config.json` alone.
fn generation_defaults(json: Option<&[u8]>, config: &Value) -> Result<GenerationDefaults, CheckpointError> {
    let mut defaults = json.map(GenerationDefaults::from_json).transpose()?.unwrap_or_default();
    if defaults.eos_ids.is_empty() {
        let eos = config.get("eos_token_id").cloned().unwrap_or_default();
        let from_config = serde_json::json!({ "eos_token_id": eos }).to_string();
        defaults.eos_ids = GenerationDefaults::from_json(from_config.as_bytes())?.eos_ids;
    }
    Ok(defaults)
}
