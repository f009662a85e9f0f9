//! Names of the weights in the checkpoint layouts.

use super::config::{Config, Layout};
use crate::{blocks::vision::LayerNames, weights::WeightMap};

/// Names of one layout. The names in `layer` omit the layer's prefix.
pub struct Names {
    pub class: String,
    /// The positions of the class token and of the patches.
    pub positions: String,
    pub patch: String,
    /// Prefix of the layers. The prefix of one layer is this prefix, a dot and the layer's index.
    pub layers: String,
    pub layer: LayerNames,
    /// Norm and matrices of the merger.
    pub merger: [String; 3],
    pub decoder: &'static str,
    /// Output projection of the text model.
    pub head: &'static str,
}

impl Names {
    pub fn of(config: &Config, map: &WeightMap<'_>) -> Self {
        let mut names = match config.layout {
            Layout::Released => Names::released(),
            // Since version 4.56, transformers renames the weights when it loads them, and it may
            // save either set of names.
            Layout::Converted if map.has("vision_tower.embeddings.cls_token") => {
                Names::converted("", "language_model.model", "language_model.lm_head.weight")
            }
            Layout::Converted => Names::converted("model.", "model.language_model", "lm_head.weight"),
        };
        if !config.vision.has_qk_norm {
            names.layer.qk_norms = None;
        }
        names
    }

    /// Names of `modeling_intern_vit.py` and `modeling_internvl_chat.py`, which come with released
    /// checkpoints.
    fn released() -> Self {
        let tower = |part: &str| format!("vision_model.{part}");
        Names {
            class: tower("embeddings.class_embedding"),
            positions: tower("embeddings.position_embedding"),
            patch: tower("embeddings.patch_embedding"),
            layers: tower("encoder.layers"),
            layer: LayerNames {
                qk_norms: Some(["attn.q_norm", "attn.k_norm"]),
                scales: Some(["ls1", "ls2"]),
                ..LayerNames::TIMM
            },
            merger: ["mlp1.0", "mlp1.1", "mlp1.3"].map(str::to_owned),
            decoder: "language_model.model",
            head: "language_model.lm_head.weight",
        }
    }

    /// Names of `modeling_internvl.py` in transformers 5.17.
    fn converted(prefix: &str, decoder: &'static str, head: &'static str) -> Self {
        let tower = |part: &str| format!("{prefix}vision_tower.{part}");
        Names {
            class: tower("embeddings.cls_token"),
            positions: tower("embeddings.position_embeddings"),
            patch: tower("embeddings.patch_embeddings.projection"),
            layers: tower("encoder.layer"),
            layer: LayerNames {
                attention_norm: "layernorm_before",
                qkv: &["attention.q_proj", "attention.k_proj", "attention.v_proj"],
                qk_norms: Some(["attention.q_norm", "attention.k_norm"]),
                out: "attention.projection_layer",
                mlp_norm: "layernorm_after",
                mlp: ["mlp.fc1", "mlp.fc2"],
                scales: Some(["lambda_1", "lambda_2"]),
            },
            merger: ["layer_norm", "linear_1", "linear_2"].map(|part| format!("{prefix}multi_modal_projector.{part}")),
            decoder,
            head,
        }
    }
}
