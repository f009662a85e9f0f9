//! Lists of modules by name, as in quantized checkpoints.

use std::collections::BTreeSet;

use regex::Regex;

use super::error::QuantizationError;

/// The modules that a list names.
///
/// An entry matches a module if the dot-separated parts of the entry are consecutive parts of the
/// module's name, as in `lm_head`, `visual` or `model.layers.0.mlp.gate`. This rule covers the
/// matches of transformers (5.17, `should_convert_module`: a prefix or a suffix) and of vLLM (0.26,
/// `is_layer_skipped`: whole names), except that `layers.1` does not also match `layers.10`. The
/// parts `model` and `language_model` are ignored, because releases of a model differ in them.
///
/// An entry with a `*`, which matches any text, must match the whole name; `?` and brackets are
/// literal characters. An entry that starts with `re:` is a regular expression that must match the
/// start of the name. Both kinds of entry are tested against every name that the module has in any
/// release: ModelOpt writes `model.visual*` for files with the prefix `visual.` (vLLM's issue
/// 28072).
#[derive(Clone, Debug, Default)]
pub struct Modules {
    /// Each name without the ignored parts.
    names: BTreeSet<String>,
    patterns: Vec<Regex>,
}

/// Parts of names that are ignored, because releases of one model differ in them.
pub(crate) const OUTER: [&str; 2] = ["model", "language_model"];

/// Prefixes of a decoder's names in different releases.
const BEFORE_DECODER: [&str; 5] = ["", "model.", "language_model.", "model.language_model.", "language_model.model."];
/// Prefixes of the names of a vision tower and of the layers that connect it to a decoder.
const BEFORE_TOWER: [&str; 2] = ["", "model."];
/// First parts of a decoder's names, after the ignored parts are removed.
const DECODER: [&str; 4] = ["layers", "embed_tokens", "norm", "lm_head"];

impl Modules {
    /// A list of `entries` from `file`.
    ///
    /// # Errors
    /// [`QuantizationError::Pattern`].
    pub fn new<'e>(file: &'static str, entries: impl IntoIterator<Item = &'e str>) -> Result<Self, QuantizationError> {
        let mut modules = Modules::default();
        for entry in entries {
            let pattern = match entry.strip_prefix("re:") {
                Some(pattern) => Some(format!("^(?:{pattern})")),
                None if entry.contains('*') => Some(format!("^{}$", regex::escape(entry).replace("\\*", ".*"))),
                None => None,
            };
            match pattern {
                None => drop(modules.names.insert(inner(entry))),
                Some(pattern) => modules.patterns.push(Regex::new(&pattern).map_err(|error| {
                    let reason = error.to_string().lines().last().unwrap_or_default().to_owned();
                    QuantizationError::Pattern { file, pattern: entry.to_owned(), reason }
                })?),
            }
        }
        Ok(modules)
    }

    /// Whether the list names `module`.
    pub fn has(&self, module: &str) -> bool {
        let inner = inner(module);
        if self.names_a_part_of(&inner) || self.names_a_part_of(module) {
            return true;
        }
        let names = elsewhere(&inner);
        let is_named = |pattern: &Regex| pattern.is_match(module) || names.iter().any(|name| pattern.is_match(name));
        self.patterns.iter().any(is_named)
    }

    /// Whether some consecutive parts of `name` form an entry.
    fn names_a_part_of(&self, name: &str) -> bool {
        let ends: Vec<usize> = name.match_indices('.').map(|(at, _)| at).chain([name.len()]).collect();
        let starts = std::iter::once(0).chain(name.match_indices('.').map(|(at, _)| at + 1));
        starts.enumerate().any(|(part, start)| ends[part..].iter().any(|end| self.names.contains(&name[start..*end])))
    }
}

/// The name without the ignored parts, or the whole name if nothing would be left.
fn inner(name: &str) -> String {
    let parts: Vec<&str> = name.split('.').filter(|part| !OUTER.contains(part)).collect();
    if parts.is_empty() { name.to_owned() } else { parts.join(".") }
}

/// All names that the module `inner` may have in the releases of its model.
fn elsewhere(inner: &str) -> Vec<String> {
    let first = inner.split('.').next().unwrap_or_default();
    let before = if DECODER.contains(&first) { &BEFORE_DECODER[..] } else { &BEFORE_TOWER };
    before.iter().map(|before| format!("{before}{inner}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn has(entry: &str, module: &str) -> bool {
        Modules::new("config.json", [entry]).expect("a pattern").has(module)
    }

    #[test]
    fn an_entry_names_whole_parts_wherever_they_stand() {
        for (entry, module) in [
            ("lm_head", "lm_head"),
            ("visual", "model.visual.blocks.3.attn.proj"),
            ("model.visual.blocks.3.attn.proj", "visual.blocks.3.attn.proj"),
            ("model.layers.1", "model.language_model.layers.1.mlp.up_proj"),
            ("mlp.gate", "model.layers.7.mlp.gate"),
            ("down_proj", "model.layers.7.mlp.down_proj"),
            ("model.language_model", "model.language_model.layers.7.mlp.down_proj"),
        ] {
            assert!(has(entry, module), "{entry} names {module}");
        }
        for (entry, module) in [
            ("model.layers.1", "model.layers.10.mlp.up_proj"),
            ("mlp.gate", "model.layers.7.mlp.gate_proj"),
            ("model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"),
            ("visual", "model.layers.0.visuals.down_proj"),
        ] {
            assert!(!has(entry, module), "{entry} does not name {module}");
        }
    }

    #[test]
    fn patterns_and_globs_know_the_names_of_every_release() {
        assert!(has("re:.*lm_head", "model.lm_head") && has("re:visual.*", "model.visual.merger.mlp.0"));
        assert!(
            !has("re:down_proj", "layers.0.mlp.down_proj"),
            "a name either begins with the pattern or does not match"
        );
        assert!(has("model.layers.*.mlp.gate", "model.layers.7.mlp.gate"));
        assert!(!has("*.mlp.gate", "model.layers.7.mlp.gate_proj"));
        let (tower, layer) = ("visual.blocks.3.attn.qkv", "model.language_model.layers.0.self_attn.q_proj");
        for (entry, module) in [
            ("visual*", tower),
            ("model.visual*", tower),
            ("*visual*", tower),
            ("re:model.visual.*", tower),
            (r"re:^model\.visual\.", tower),
            ("model.visual*", "model.visual.merger.mlp.0"),
            ("visual*", "model.visual.merger.mlp.0"),
            ("model.layers.0.self_attn*", layer),
            ("language_model.layers.0.self_attn*", layer),
            ("model.language_model.layers.0.self_attn*", layer),
            ("language_model.model.layers.0.self_attn*", layer),
            ("layers.0.self_attn*", layer),
            (r"re:language_model\.model\.layers\.0\.", "model.layers.0.self_attn.q_proj"),
            ("language_model.lm_head*", "lm_head"),
        ] {
            assert!(has(entry, module), "{entry} names {module}");
        }
        for (entry, module) in [
            ("model.layers.0.self_attn*", "model.language_model.layers.10.self_attn.q_proj"),
            ("language_model*", tower),
            ("re:.*language_model", tower),
            ("model.visual*", layer),
        ] {
            assert!(!has(entry, module), "{entry} does not name {module}");
        }
        let error = Modules::new("config.json", ["re:(?=x)"]).expect_err("lookahead is not supported");
        assert!(error.to_string().starts_with("config.json: the module pattern \"re:(?=x)\" is not valid"), "{error}");
    }
}
