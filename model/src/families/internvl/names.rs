//! What the layouts of checkpoints call the weights.

use super::config::{Config, Layout};
use crate::{blocks::vision::LayerNames, weights::WeightMap};

/// The names of one layout. Those of a layer are without its prefix.
pub struct Names {
    /// The class token.
    pub class: String,
    /// The positions of the class token and of the patches.
    pub positions: String,
    /// The projection of a patch.
    pub patch: String,
    /// Layer `index` is this, a dot and the index.
    pub layers: String,
    /// The parts of a layer.
    pub layer: LayerNames,
    /// The merger's norm and matrices.
    pub merger: [String; 3],
    /// The text model.
    pub decoder: &'static str,
    /// The text model's output projection.
    pub head: &'static str,
}

impl Names {
    /// The names of `config`'s layout.
    pub fn of(config: &Config, map: &WeightMap<'_>) -> Self {
        let mut names = match config.layout {
            Layout::Released => Names::released(),
            // transformers has renamed what it loads since 4.56, and may write either.
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

    /// `modeling_intern_vit.py` and `modeling_internvl_chat.py`, which released checkpoints bring along.
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

    /// `modeling_internvl.py` of transformers 5.17.
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
