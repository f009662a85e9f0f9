//! The released processor settings of Qwen's vision towers, for checkpoints that lack the
//! processors' files.

use serde_json::{Value, json};

/// The `preprocessor_config.json` of released Qwen checkpoints without separate video settings. Its
/// settings apply to pictures and videos. The patch sizes are taken from `config`.
pub fn released_processor(config: &Value) -> Value {
    let of_tower = |field: &str, released: u64| config["vision_config"][field].as_u64().unwrap_or(released);
    json!({
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": 3136,
        "max_pixels": 12_845_056,
        "patch_size": of_tower("patch_size", 14),
        "temporal_patch_size": of_tower("temporal_patch_size", 2),
        "merge_size": of_tower("spatial_merge_size", 2),
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    })
}

/// `preprocessor_config.json` and `video_preprocessor_config.json` of released checkpoints with
/// separate video settings (Qwen3-VL and later), with the patch sizes of this `config.json`.
pub fn released_video_processors(config: &Value) -> Vec<(&'static str, Vec<u8>)> {
    let of_tower = |field: &str, released: u64| config["vision_config"][field].as_u64().unwrap_or(released);
    let settings = |kind: &str, name: &str, shortest_edge: u64, longest_edge: u64| {
        let settings = json!({
            kind: name,
            "size": { "shortest_edge": shortest_edge, "longest_edge": longest_edge },
            "patch_size": of_tower("patch_size", 16),
            "temporal_patch_size": of_tower("temporal_patch_size", 2),
            "merge_size": of_tower("spatial_merge_size", 2),
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        });
        settings.to_string().into_bytes()
    };
    let pictures = settings("image_processor_type", "Qwen2VLImageProcessorFast", 65_536, 16_777_216);
    let videos = settings("video_processor_type", "Qwen3VLVideoProcessor", 4096, 25_165_824);
    vec![("preprocessor_config.json", pictures), ("video_preprocessor_config.json", videos)]
}
