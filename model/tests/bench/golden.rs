//! Recorded golden cases.

use std::ops::Range;

use bursar_model::{
    checkpoint::Checkpoint,
    flow::{EncodedImage, ImageLimits, MediaGrid, ResizedImage, Video},
    processor::{ImageProcessor, ImageProcessorConfig},
    registry::FamilyConfig,
    text::{ContentPart, Message, Role, TemplateInputs},
};
use safetensors::SafeTensors;
use serde_json::{Map, Value};

use super::repository;

/// A chat with the results that transformers computed for it.
pub struct Case {
    pub name: String,
    pub messages: Vec<Message>,
    pub prompt: String,
    /// The prompt including the text that the family writes around pictures and between the steps
    /// of videos. `None` if the family writes no such text.
    pub written: Option<String>,
    pub pictures: Vec<String>,
    /// Grid of the picture or video of each placeholder, in order.
    pub visuals: Vec<MediaGrid>,
    /// Names of the pictures and videos in `visuals`, each with its range in `images`.
    pub shown: Vec<(String, Range<usize>)>,
    /// Resized images, one per picture, tile and time step of a video, in order.
    pub images: Vec<ResizedImage>,
    recorded: Vec<u8>,
}

/// Processes a recorded picture with the checkpoint's processor. Returns the grid of its
/// placeholder and the pictures that the encoder sees.
pub fn picture(checkpoint: &Checkpoint, name: &str) -> (MediaGrid, Vec<ResizedImage>) {
    processed(checkpoint.image_processor.as_ref().expect("a checkpoint with pictures"), name)
}

fn processed(processor: &ImageProcessor, name: &str) -> (MediaGrid, Vec<ResizedImage>) {
    let limits = ImageLimits::default();
    let bytes = EncodedImage::open(bursar_golden::path("pictures").join(name), &limits).expect("the picture opens");
    let decoded = bytes.decode(&limits).expect("the picture decodes");
    let plan = processor.plan(decoded.width(), decoded.height()).expect("the picture is planned");
    let pieces = processor.process_tiles(&decoded).expect("the picture is processed");
    (plan.visual(), pieces.into_iter().map(|piece| piece.image).collect())
}

/// The frames of a recorded video.
pub fn video(name: &str, frames_per_second: f64) -> Video {
    let folder = bursar_golden::path("videos");
    let path = |index: usize| folder.join(format!("{name}_{index}.png"));
    let open = |index| EncodedImage::open(path(index), &ImageLimits::default()).expect("the frame opens");
    let count = (0..).take_while(|index| path(*index).exists()).count();
    assert!(count > 0, "no frames of {name}");
    Video::new((0..count).map(open).collect::<Vec<_>>(), frames_per_second)
}

/// Processes the picture or video of a message part. `images` processes pictures.
fn show(
    checkpoint: &Checkpoint,
    images: Option<&ImageProcessor>,
    part: &Value,
) -> Option<(MediaGrid, Vec<ResizedImage>)> {
    match text(&part["type"]) {
        "image" => Some(processed(images.expect("a checkpoint with pictures"), text(&part["image"]))),
        "video" => {
            let rate = part["frames_per_second"].as_f64().expect("a rate");
            let (video, limits) = (video(text(&part["video"]), rate), ImageLimits::default());
            let processor = checkpoint.video_processor.as_ref().expect("a checkpoint with videos");
            let plan = processor.plan(&video, &limits, usize::MAX).expect("the video is planned");
            let steps = processor.process(&video, &plan, &limits).expect("the video is processed");
            Some((plan.grid(), steps.into_iter().map(|step| step.image).collect()))
        }
        _ => None,
    }
}

/// The image processor of the checkpoint in `folder` with a case's `settings`, if there are any.
fn with_settings(folder: &str, checkpoint: &Checkpoint, settings: &Value) -> Option<ImageProcessor> {
    let (own, Some(settings)) = (checkpoint.image_processor.as_ref()?, settings.as_object()) else {
        return checkpoint.image_processor.clone();
    };
    let file = std::fs::read(repository(&format!("{folder}/preprocessor_config.json"))).expect("the file opens");
    let mut changed: Map<String, Value> = serde_json::from_slice(&file).expect("JSON");
    changed.extend(settings.clone());
    let changed = ImageProcessorConfig::from_json(Value::Object(changed).to_string().as_bytes()).expect("settings");
    // The sizes of patches are not in this file.
    let (tiling, pixel_bounds) = (changed.tiling, changed.pixel_bounds);
    Some(ImageProcessor::new(ImageProcessorConfig { tiling, pixel_bounds, ..own.config().clone() }).expect("settings"))
}

impl Case {
    /// Reads the case `name` next to the checkpoint in `folder`.
    pub fn read(folder: &str, checkpoint: &Checkpoint, name: &str) -> Self {
        let file = |ending: &str| {
            let path = repository(&format!("{folder}/cases/{name}.{ending}"));
            std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
        };
        let json: Value = serde_json::from_slice(&file("json")).expect("JSON");
        let pictures: Vec<String> = list(&json["images"]).map(|name| text(name).to_owned()).collect();
        let contents = list(&json["messages"]).flat_map(|message| list(&message["content"]));
        let (mut visuals, mut shown, mut images) = (Vec::new(), Vec::new(), Vec::new());
        let image_processor = with_settings(folder, checkpoint, &json["processor"]);
        for part in contents {
            let Some((visual, pieces)) = show(checkpoint, image_processor.as_ref(), part) else { continue };
            let name = text(&part[text(&part["type"])]).to_owned();
            shown.push((name, images.len()..images.len() + pieces.len()));
            visuals.push(visual);
            images.extend(pieces);
        }
        Case {
            name: name.to_owned(),
            messages: list(&json["messages"]).map(message).collect(),
            prompt: text(&json["prompt"]).to_owned(),
            written: json["written"].as_str().map(str::to_owned),
            visuals,
            shown,
            images,
            pictures,
            recorded: file("safetensors"),
        }
    }

    /// Token ids of the rendered prompt, with one placeholder per picture, and per video or time
    /// step of a video.
    pub fn prompt_ids(&self, checkpoint: &Checkpoint) -> Vec<u32> {
        let family = FamilyConfig::of(checkpoint).expect("a family serves the checkpoint");
        checkpoint
            .prompts()
            .expect("the checkpoint has a tokenizer")
            .with_placeholders(family.placeholder_texts())
            .encode_rewritten(&self.messages, &TemplateInputs::default(), usize::MAX, |text| {
                family.write_visuals(text, &self.visuals)
            })
            .expect("the prompt is encoded")
    }

    /// Asserts that the prompt's text, its tokens and their positions equal the recording.
    pub fn assert_prompt_and_positions(&self, checkpoint: &Checkpoint) {
        let rendered = checkpoint.template.render(&self.messages, &TemplateInputs::default());
        assert_eq!(rendered.expect("the template renders"), self.prompt, "{}", self.name);
        self.assert_tokens_and_positions(checkpoint);
    }

    /// Asserts that the prompt's tokens and their positions equal the recording.
    pub fn assert_tokens_and_positions(&self, checkpoint: &Checkpoint) {
        let name = &self.name;
        let config = FamilyConfig::of(checkpoint).expect("a family serves the checkpoint");
        let layout = config.lay_out(self.prompt_ids(checkpoint), &self.visuals).expect("the prompt is laid out");
        let ids: Vec<i64> = layout.tokens.iter().map(|token| i64::from(*token)).collect();
        assert_eq!(Some(ids), self.integers("input_ids"), "{name}");
        let positions: Vec<i64> =
            (0..3).flat_map(|axis| layout.positions.iter().map(move |place| i64::from(place[axis]))).collect();
        assert_eq!(Some(positions), self.integers("position_ids"), "{name}");
        let delta = self.integers("rope_delta").expect("a delta")[0];
        assert_eq!(i64::from(layout.next_position), layout.tokens.len() as i64 + delta, "{name}");
    }

    /// A recorded tensor of integers. `None` if the case does not have it.
    pub fn integers(&self, tensor: &str) -> Option<Vec<i64>> {
        let tensors = SafeTensors::deserialize(&self.recorded).expect("safetensors");
        let (numbers, _) = tensors.tensor(tensor).ok()?.data().as_chunks::<8>().to_owned();
        Some(numbers.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect())
    }

    /// A recorded tensor of floats. `None` if the case does not have it.
    pub fn floats(&self, tensor: &str) -> Option<Vec<f32>> {
        let tensors = SafeTensors::deserialize(&self.recorded).expect("safetensors");
        let (numbers, _) = tensors.tensor(tensor).ok()?.data().as_chunks::<4>().to_owned();
        Some(numbers.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
    }

    /// A recorded tensor of bytes. `None` if the case does not have it.
    pub fn bytes(&self, tensor: &str) -> Option<Vec<u8>> {
        let tensors = SafeTensors::deserialize(&self.recorded).expect("safetensors");
        Some(tensors.tensor(tensor).ok()?.data().to_vec())
    }

    /// The recorded rows of logits, each with its position.
    pub fn logits(&self, places: &str, rows: &str) -> Vec<(usize, Vec<f32>)> {
        let (places, rows) = (self.integers(places).expect("places"), self.floats(rows).expect("logits"));
        let columns = rows.len() / places.len();
        places.iter().map(|place| *place as usize).zip(rows.chunks_exact(columns).map(<[f32]>::to_vec)).collect()
    }

    pub fn greedy_tokens(&self) -> Vec<u32> {
        self.integers("greedy_tokens").expect("tokens").into_iter().map(|token| token as u32).collect()
    }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("{value} is not a text"))
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn message(recorded: &Value) -> Message {
    let role = match text(&recorded["role"]) {
        "system" => Role::System,
        "assistant" => Role::Assistant,
        "user" => Role::User,
        other => panic!("no case has a {other}"),
    };
    let part = |part: &Value| match text(&part["type"]) {
        "image" => ContentPart::Image,
        "video" => ContentPart::Video,
        _ => ContentPart::Text(text(&part["text"]).to_owned()),
    };
    let content = match &recorded["content"] {
        Value::String(text) => vec![ContentPart::Text(text.clone())],
        parts => list(parts).map(part).collect(),
    };
    Message { role, content }
}

/// The largest difference, relative to the largest expected number.
pub fn relative_error(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len(), "both lists have the same length");
    assert!(found.iter().all(|number| number.is_finite()), "every computed number is finite");
    let worst = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    worst / expected.iter().map(|number| number.abs()).fold(0.0, f32::max)
}

/// Index of the largest number, which is the greedy choice. If several are equal, the first index.
pub fn greatest(logits: &[f32]) -> u32 {
    (0..logits.len()).rev().max_by(|a, b| logits[*a].total_cmp(&logits[*b])).expect("logits") as u32
}
