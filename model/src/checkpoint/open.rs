//! Opening a checkpoint: the files are parsed and checked, and the weights are mapped but not read.

use std::borrow::Cow;
use std::path::PathBuf;
use std::sync::Arc;

use bursar_kernels::StateDtype;
use serde::de::IgnoredAny;
use serde_json::{Map, Value, json};

use super::checkpoint_source::CheckpointSource;
use super::error::CheckpointError;
use super::fingerprint::CheckpointFingerprint;
use super::quantization::{
    MODELOPT, QuantizationError, SETTINGS, StoredFormat, WeightFormats, WeightQuantization, stored_formats,
};
use super::tensor_index::{DRAFT_MODEL, TensorIndex};
use super::tensor_info::TensorInfo;
use super::text_files::TextFiles;
use crate::flow::CacheFormat;
use crate::processor::{ImageProcessor, ImageProcessorConfig, VideoProcessor, config::TILING_KEYS};
use crate::sampling::GenerationDefaults;
use crate::text::error::TextError;
use crate::text::template_source::{DEFAULT_TEMPLATE, TemplateFiles};
use crate::text::{ChatTemplate, PromptEncoder, TemplateLimits, TemplateSources, Tokenizer, VocabularyFiles};

/// Keys of `config.json` that have the settings of the text model.
const TEXT_PARTS: [&str; 2] = ["text_config", "llm_config"];

/// The output projection that a draft head multiplies by. Replies do not depend on it, because the
/// decoder verifies every draft.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DraftProjection {
    /// The output projection of the decoder.
    #[default]
    Decoder,
    /// A second copy, rounded to 4-bit integers while it is read. A draft then reads a quarter of
    /// the projection's bytes, and a few drafts differ. If the target or the projection does not
    /// support this format, the head uses the output projection of the decoder.
    Int4IfSupported,
    /// Like `Int4IfSupported`, but an unsupported format is an error.
    Int4,
}

#[derive(Debug)]
pub struct Checkpoint {
    /// All of `config.json`, from which each family reads its settings. Quantization settings that
    /// a text part repeats are removed from the text part.
    pub config: Map<String, Value>,
    /// `generation_config.json`. If it has no end tokens, they are taken from `config.json`, or
    /// else from its text part and from the tokenizer.
    pub generation: GenerationDefaults,
    /// Settings from `processor_config.json`, or else `preprocessor_config.json`; `None`
    /// for models without pictures.
    pub image_processor: Option<ImageProcessor>,
    /// Settings from `processor_config.json`, or else `video_preprocessor_config.json`, or else
    /// `preprocessor_config.json`, as transformers reads them (5.17, `video_processing_utils.py`);
    /// `None` if no file has settings for videos.
    pub video_processor: Option<VideoProcessor>,
    pub template: Arc<ChatTemplate>,
    /// All weights by name.
    pub tensors: TensorIndex,
    quantization_place: String,
    quantization: Option<WeightQuantization>,
    cache: CacheFormat,
    state_dtype: StateDtype,
    loads_draft_head: bool,
    draft_model: Option<Map<String, Value>>, // `config.json` of the draft model
    draft_projection: DraftProjection,
    context_limit: usize,
    has_own_video_processor: bool, // `false` if videos use the settings of pictures
    source: CheckpointSource,
    files: TextFiles,
    fingerprint: CheckpointFingerprint,
    config_fingerprint: CheckpointFingerprint,
}

impl Checkpoint {
    /// Opens and checks a checkpoint. No weight is read, and the tokenizer
    /// is not [parsed](Self::prompts) yet.
    ///
    /// # Errors
    /// [`CheckpointError`] if a file is missing, damaged or hostile.
    pub fn open(source: CheckpointSource) -> Result<Self, CheckpointError> {
        Self::open_with_tokenizer(source, None)
    }

    /// Like [`open`](Self::open), with the tokenizer and the chat templates of this folder
    /// instead of the checkpoint's.
    ///
    /// # Errors
    /// See [`open`](Self::open).
    pub fn open_with_tokenizer(source: CheckpointSource, tokenizer: Option<PathBuf>) -> Result<Self, CheckpointError> {
        let config_json = source.require("config.json")?;
        let mut config: Map<String, Value> = object("config.json", &config_json)?;
        let quantization_place = gather_quantization(&mut config);
        let files = TextFiles::read(&source, tokenizer.map(CheckpointSource::Folder).as_ref())?;
        let mut tensors = TensorIndex::open(&source)?;
        // Unsupported settings are refused later, when `weight_formats` combines the settings with
        // the user's choice.
        let modelopt = files.get(MODELOPT).and_then(|json| serde_json::from_slice(json).ok());
        let formats = stored_formats((&config, &quantization_place), modelopt.as_ref());
        if let Ok(Some(StoredFormat::Packed(packed))) = formats {
            tensors = tensors.with_packed(&packed)?;
        }
        let named = [("config.json", Some(&*config_json))].into_iter().chain(files.named());
        let fingerprint = CheckpointFingerprint::new(named, tensors.shards());
        let config_fingerprint = CheckpointFingerprint::new([("config.json", Some(&*config_json))], &[]);
        let templates = TemplateSources::read(TemplateFiles {
            jinja: files.get("chat_template.jinja"),
            json: files.get("chat_template.json"),
            tokenizer_config: files.get("tokenizer_config.json"),
        })?;
        let template = Arc::new(ChatTemplate::new(templates, TemplateLimits::default())?);
        // A missing tokenizer file or a truncated tokenizer.json is refused here, before anything
        // is leased for the model.
        TokenizerFiles::of(&files)?.check()?;
        let processors = ProcessorFiles::read(&files, &config)?;
        let video_processor = processors
            .video
            .map(|json| VideoProcessor::new(ImageProcessorConfig::from_video_json(&json)?))
            .transpose()?;
        let image_processor =
            processors.image.map(|json| ImageProcessor::new(ImageProcessorConfig::from_json(&json)?)).transpose()?;
        Ok(Checkpoint {
            generation: generation_defaults(&files, &config)?,
            template,
            config,
            quantization_place,
            quantization: None,
            cache: CacheFormat::Plain,
            state_dtype: StateDtype::F32,
            loads_draft_head: false,
            draft_model: None,
            draft_projection: DraftProjection::default(),
            context_limit: usize::MAX,
            image_processor,
            video_processor,
            has_own_video_processor: processors.has_own_video,
            tensors,
            source,
            files,
            fingerprint,
            config_fingerprint,
        })
    }

    /// Whether the weights are in a GGUF file. Most GGUF files are quantized.
    pub(crate) fn is_gguf(&self) -> bool {
        matches!(self.source, CheckpointSource::Gguf(_))
    }

    /// The same checkpoint, with the quantization that the user asks for.
    pub fn with_quantization(self, quantization: Option<WeightQuantization>) -> Self {
        Checkpoint { quantization, ..self }
    }

    /// The same checkpoint, with the KV cache format that the user asks for.
    pub fn with_cache(self, cache: CacheFormat) -> Self {
        Checkpoint { cache, ..self }
    }

    /// The same checkpoint, with the storage type of recurrent states that the user asks for.
    pub fn with_state_dtype(self, state_dtype: StateDtype) -> Self {
        Checkpoint { state_dtype, ..self }
    }

    /// The same checkpoint, with a draft model from a separate checkpoint, such as an EAGLE-3
    /// head. Its tensors are named `draft_model.*`. A copy of the model's own embedding is left out.
    /// [`with_draft_head`](Self::with_draft_head) then loads the draft model's head. For a random
    /// checkpoint, the draft model needs no weights.
    ///
    /// # Errors
    /// [`CheckpointError`] if a file of the draft model is missing, damaged or hostile.
    pub fn with_draft_model(self, source: &CheckpointSource) -> Result<Self, CheckpointError> {
        match self.source {
            CheckpointSource::Random(_) => self.with_random_draft_model(source),
            _ => self.with_draft_tensors(source, Some(TensorIndex::open(source)?)),
        }
    }

    /// Like [`with_draft_model`](Self::with_draft_model), with random weights for the draft model, for
    /// planning.
    ///
    /// # Errors
    /// See [`with_draft_model`](Self::with_draft_model).
    pub fn with_random_draft_model(self, source: &CheckpointSource) -> Result<Self, CheckpointError> {
        self.with_draft_tensors(source, None)
    }

    fn with_draft_tensors(
        mut self,
        source: &CheckpointSource,
        tensors: Option<TensorIndex>,
    ) -> Result<Self, CheckpointError> {
        let json = source.require("config.json")?;
        let config = object("config.json", &json)?;
        let with = |fingerprint: CheckpointFingerprint, shards| {
            CheckpointFingerprint::new([("model", Some(&fingerprint.0[..])), (DRAFT_MODEL, Some(&*json))], shards)
        };
        self.fingerprint = with(self.fingerprint, tensors.as_ref().map_or(&[], TensorIndex::shards));
        self.config_fingerprint = with(self.config_fingerprint, &[]);
        self.tensors = match tensors {
            Some(tensors) => self.tensors.with_draft_model(tensors)?,
            None => self.tensors.with_random_draft_model(),
        };
        Ok(Checkpoint { draft_model: Some(config), ..self })
    }

    /// The same checkpoint, with its draft head if `is_loaded`. Otherwise, the head's tensors stay
    /// unread.
    pub fn with_draft_head(self, is_loaded: bool) -> Self {
        Checkpoint { loads_draft_head: is_loaded, ..self }
    }

    /// The same checkpoint, with this output projection for its draft head.
    pub fn with_draft_projection(self, draft_projection: DraftProjection) -> Self {
        Checkpoint { draft_projection, ..self }
    }

    /// The same checkpoint, for sequences of at most `tokens` tokens. Sliding windows of `tokens`
    /// or more tokens are ignored, because they would change nothing.
    pub fn with_context_limit(self, tokens: usize) -> Self {
        Checkpoint { context_limit: tokens, ..self }
    }

    /// Maximum number of tokens of a sequence. `usize::MAX` if nothing has set a limit; the
    /// configuration may have a lower limit.
    pub fn context_limit(&self) -> usize {
        self.context_limit
    }

    /// The storage format of keys and values.
    pub fn cache(&self) -> CacheFormat {
        self.cache
    }

    /// The storage type of the matrices of recurrent states.
    pub fn state_dtype(&self) -> StateDtype {
        self.state_dtype
    }

    /// Whether the draft head is loaded with the model.
    pub fn loads_draft_head(&self) -> bool {
        self.loads_draft_head
    }

    /// `config.json` of the [draft model](Self::with_draft_model), if there is one.
    pub fn draft_model(&self) -> Option<&Map<String, Value>> {
        self.draft_model.as_ref()
    }

    /// The output projection of the draft head.
    pub fn draft_projection(&self) -> DraftProjection {
        self.draft_projection
    }

    /// The folder, embedded files or shape from which the checkpoint was opened.
    pub fn source(&self) -> &CheckpointSource {
        &self.source
    }

    /// The video processor, if the checkpoint has separate settings for it. Some models need
    /// separate settings, because image settings cannot describe their videos.
    pub fn own_video_processor(&self) -> Option<&VideoProcessor> {
        self.video_processor.as_ref().filter(|_| self.has_own_video_processor)
    }

    /// `model_type` of `config.json`, "qwen2_5_vl" for example.
    pub fn model_type(&self) -> Option<&str> {
        self.config.get("model_type")?.as_str()
    }

    /// `architectures` of `config.json`, "Qwen2_5_VLForConditionalGeneration" for example.
    pub fn architectures(&self) -> impl Iterator<Item = &str> {
        self.config.get("architectures").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str)
    }

    /// Parses the tokenizer and combines it with the templates. This takes a third of a second for
    /// a vocabulary of 150,000 tokens, which is most of the time of opening a checkpoint.
    ///
    /// # Errors
    /// [`CheckpointError`] if the tokenizer's files are damaged.
    pub fn prompts(&self) -> Result<PromptEncoder, CheckpointError> {
        let tokenizer = match TokenizerFiles::of(&self.files)? {
            TokenizerFiles::Whole(json) => Tokenizer::from_bytes(json)?,
            TokenizerFiles::Parts(vocabulary) => Tokenizer::from_bytes(&vocabulary.tokenizer_json()?)?,
        };
        Ok(PromptEncoder::new(tokenizer, self.template.clone()))
    }

    /// Like [`prompts`](Self::prompts), with this Jinja template instead of the checkpoint's.
    ///
    /// # Errors
    /// See [`prompts`](Self::prompts); the template does not compile.
    pub fn prompts_with(&self, template: &str) -> Result<PromptEncoder, CheckpointError> {
        let sources = TemplateSources {
            templates: [(DEFAULT_TEMPLATE.to_owned(), template.to_owned())].into(),
            special_tokens: self.template.sources().special_tokens.clone(),
        };
        let template = ChatTemplate::new(sources, TemplateLimits::default())?;
        Ok(PromptEncoder::new(self.prompts()?.tokenizer().clone(), template))
    }

    /// The id of an added token, from `added_tokens.json`, `tokenizer_config.json` or
    /// `tokenizer.json`; `None` if none of these files has it.
    pub fn added_token(&self, content: &str) -> Option<u32> {
        self.files.added_token(content)
    }

    /// A tensor by its name.
    ///
    /// # Errors
    /// See [`TensorIndex::tensor`].
    pub fn tensor(&self, name: &str) -> Result<TensorInfo<'_>, CheckpointError> {
        self.tensors.tensor(name)
    }

    /// The fingerprint of all settings, the vocabulary, and the shards' names, sizes and headers.
    pub fn fingerprint(&self) -> CheckpointFingerprint {
        self.fingerprint
    }

    /// The fingerprint of only `config.json`. A profile depends on this fingerprint, on
    /// [`weights_fingerprint`](Self::weights_fingerprint) and on the processors' settings, but not
    /// on templates and vocabularies.
    pub fn config_fingerprint(&self) -> CheckpointFingerprint {
        self.config_fingerprint
    }

    /// The fingerprint of the names, types, shapes and offsets of the weights, and of the
    /// quantization that is applied while they load.
    pub fn weights_fingerprint(&self) -> CheckpointFingerprint {
        let rounded = self.quantization.map(|asked| ("quantization", Some(asked.name().as_bytes())));
        CheckpointFingerprint::new(rounded, self.tensors.shards())
    }

    /// The formats of the weights, including the quantization that the user asks for.
    ///
    /// # Errors
    /// The configuration has an unsupported format, or a different format than the user asks for.
    pub fn weight_formats(&self) -> Result<WeightFormats, QuantizationError> {
        let read = |json: &[u8]| serde_json::from_slice::<Map<String, Value>>(json).map(Value::Object);
        let modelopt = self.files.get(MODELOPT).map(|json| {
            read(json).map_err(|error| QuantizationError::Malformed { file: MODELOPT, reason: error.to_string() })
        });
        let modelopt = modelopt.transpose()?;
        WeightFormats::of(
            stored_formats((&self.config, &self.quantization_place), modelopt.as_ref())?,
            self.quantization,
        )
    }
}

/// Moves `quantization_config` to the top level, and returns the path at which the settings were
/// found. Early releases of compressed-tensors use an old name for this key. Some tools write the
/// settings into a text part, either instead of the top level or in addition to it.
fn gather_quantization(config: &mut Map<String, Value>) -> String {
    const EARLY: &str = "compression_config";
    let settings = |fields: &Map<String, Value>, key| {
        fields.get(key).and_then(Value::as_object).filter(|settings| !settings.is_empty()).cloned()
    };
    let mut place = SETTINGS.to_owned();
    if settings(config, SETTINGS).is_none()
        && let Some(mut early) = settings(config, EARLY)
    {
        early.entry("quant_method").or_insert(json!("compressed-tensors"));
        config.remove(EARLY);
        config.insert(SETTINGS.to_owned(), early.into());
        place = EARLY.to_owned();
    }
    for part in TEXT_PARTS {
        let fields = config.get(part).and_then(Value::as_object);
        let Some(inner) = fields.and_then(|fields| settings(fields, SETTINGS)) else { continue };
        let whole = settings(config, SETTINGS);
        if whole.as_ref().is_some_and(|whole| *whole != inner) {
            continue;
        }
        config[part].as_object_mut().map(|fields| fields.remove(SETTINGS));
        if whole.is_none() {
            config.insert(SETTINGS.to_owned(), inner.into());
            place = format!("{part}.{SETTINGS}");
        }
    }
    place
}

/// Parses a file that must hold a JSON object.
fn object(file: &str, json: &[u8]) -> Result<Map<String, Value>, CheckpointError> {
    let malformed = |reason: String| CheckpointError::Malformed { file: file.into(), reason };
    match serde_json::from_slice(json).map_err(|error| malformed(error.to_string()))? {
        Value::Object(fields) => Ok(fields),
        _ => Err(malformed("it is not a JSON object".into())),
    }
}

/// The settings of both processors, from the files that have them.
struct ProcessorFiles<'f> {
    image: Option<Cow<'f, [u8]>>,
    video: Option<Cow<'f, [u8]>>,
    has_own_video: bool,
}

impl<'f> ProcessorFiles<'f> {
    /// Reads `processor_config.json`, which transformers writes since 5.0, and otherwise the older
    /// files (5.17, `image_processing_base.py` and `video_processing_utils.py`). Settings for image
    /// tiles and patches may also be in `config.json`.
    fn read(files: &'f TextFiles, config: &Map<String, Value>) -> Result<Self, CheckpointError> {
        const FILE: &str = "processor_config.json";
        let both = files.get(FILE).map(|json| object(FILE, json)).transpose()?.unwrap_or_default();
        let part = |name: &str| {
            both.get(name).filter(|part| part.is_object()).map(|part| Cow::Owned(part.to_string().into_bytes()))
        };
        let file = |name: &str| files.get(name).map(Cow::Borrowed);
        let older = || file("preprocessor_config.json");
        let image = part("image_processor").or_else(older);
        let own_video = part("video_processor").or_else(|| file("video_preprocessor_config.json"));
        let has_own_video = own_video.is_some();
        let video = own_video.or_else(older);
        let key = |key: &str| TILING_KEYS.iter().find(|(own, _)| *own == key).map(|(_, name)| (*name).to_owned());
        let mut tiling: Map<_, _> =
            config.iter().filter_map(|(name, value)| Some((key(name)?, value.clone()))).collect();
        tiling.extend(pooled_patches(config));
        if tiling.is_empty() {
            return Ok(ProcessorFiles { image, video, has_own_video });
        }
        let joined = |json: Cow<'f, [u8]>| {
            let mut settings = tiling.clone();
            let own = object("preprocessor_config.json", &json)?;
            settings.extend(own.into_iter().map(|(name, value)| (key(&name).unwrap_or(name), value)));
            Ok::<_, CheckpointError>(Cow::Owned(Value::Object(settings).to_string().into_bytes()))
        };
        let (image, video) = (image.map(joined).transpose()?, video.map(joined).transpose()?);
        Ok(ProcessorFiles { image, video, has_own_video })
    }
}

/// Patch settings of the image processor of Gemma 3, derived from `mm_tokens_per_image`. The
/// defaults are those of `Gemma3Config` and `SiglipVisionConfig` (transformers 5.17). Empty if the
/// sizes are inconsistent. The family then refuses the checkpoint.
fn pooled_patches(config: &Map<String, Value>) -> Map<String, Value> {
    if config.get("model_type").and_then(Value::as_str) != Some("gemma3") {
        return Map::new();
    }
    let size = |value: Option<&Value>, default| value.map_or(Some(default), Value::as_u64);
    let of_tower = |key: &str, default| size(config.get("vision_config").and_then(|tower| tower.get(key)), default);
    let pooled = || {
        let tokens = size(config.get("mm_tokens_per_image").filter(|value| !value.is_null()), 256)?;
        let patch = of_tower("patch_size", 16)?;
        let merge = of_tower("image_size", 224)?.checked_div(patch)?.checked_div(tokens.isqrt())?;
        let merge = Some(merge).filter(|merge| *merge > 0)?;
        Some([("patch_size".to_owned(), patch.into()), ("merge_size".to_owned(), merge.into())])
    };
    pooled().into_iter().flatten().collect()
}

enum TokenizerFiles<'f> {
    /// The complete tokenizer in `tokenizer.json`.
    Whole(&'f [u8]),
    /// `vocab.json`, `merges.txt`, and the added tokens.
    Parts(VocabularyFiles<'f>),
}

impl<'f> TokenizerFiles<'f> {
    fn of(files: &'f TextFiles) -> Result<Self, CheckpointError> {
        if let Some(json) = files.get("tokenizer.json") {
            return Ok(TokenizerFiles::Whole(json));
        }
        Ok(TokenizerFiles::Parts(VocabularyFiles {
            vocabulary: files.require("vocab.json")?,
            merges: files.require("merges.txt")?,
            added: files.get("added_tokens.json"),
            config: files.get("tokenizer_config.json"),
        }))
    }

    /// Checks that `tokenizer.json` is complete JSON. This takes about ten milliseconds, while
    /// parsing the tokenizer takes a third of a second.
    fn check(&self) -> Result<(), TextError> {
        let TokenizerFiles::Whole(json) = self else { return Ok(()) };
        let syntax = serde_json::from_slice::<IgnoredAny>(json).map(drop);
        syntax.map_err(|error| TextError::Tokenizer { reason: error.to_string() })
    }
}

/// Reads the generation defaults. Older checkpoints have their end tokens only in `config.json`. If
/// the top level of `config.json` has no end tokens, the end tokens of the text model are used. The
/// tokenizer's end token is then added, because that token ends the turns of a chat.
fn generation_defaults(files: &TextFiles, config: &Map<String, Value>) -> Result<GenerationDefaults, CheckpointError> {
    let json = files.get("generation_config.json");
    let mut defaults = json.map(GenerationDefaults::from_json).transpose()?.unwrap_or_default();
    if !defaults.eos_ids.is_empty() {
        return Ok(defaults);
    }
    let ids = |eos: Option<&Value>| {
        let from_config = serde_json::json!({ "eos_token_id": eos.unwrap_or(&Value::Null) }).to_string();
        GenerationDefaults::from_json(from_config.as_bytes()).map(|defaults| defaults.eos_ids)
    };
    defaults.eos_ids = ids(config.get("eos_token_id"))?;
    if defaults.eos_ids.is_empty() {
        let text = TEXT_PARTS.iter().find_map(|part| config.get(*part)?.get("eos_token_id"));
        defaults.eos_ids = ids(text)?;
        let own = files.end_token().and_then(|token| files.added_token(&token));
        let own = own.filter(|id| !defaults.eos_ids.contains(id));
        defaults.eos_ids.extend(own);
    }
    Ok(defaults)
}
