//! Lists of modules by name, as quantised checkpoints have them.

use std::collections::BTreeSet;

use regex::Regex;

use super::QuantizationError;

/// Modules that a list names.
///
/// An entry names a module if its parts between dots stand in the module's name one after the other: `lm_head`,
/// `visual` or `model.layers.0.mlp.gate`. That is what transformers (5.17, `should_convert_module`: a prefix or an end)
/// and vLLM (0.26, `is_layer_skipped`: whole names) have in common, without `layers.1` meaning `layers.10` as well. The
/// parts `model` and `language_model` do not count, as releases of a model differ in them. With a `*`, which stands for
/// anything, an entry is the whole name, and `?` and brackets are themselves; after `re:` it is a regular expression that the name begins with.
#[derive(Clone, Debug, Default)]
pub struct Modules {
    /// What counts of each name.
    names: BTreeSet<String>,
    patterns: Vec<Regex>,
}

/// Parts of names that releases of one model differ in.
const OUTER: [&str; 2] = ["model", "language_model"];

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
        self.names_a_part_of(&inner)
            || self.names_a_part_of(module)
            || self.patterns.iter().any(|pattern| pattern.is_match(module) || pattern.is_match(&inner))
    }

    /// Whether some parts of `name`, one after the other, are an entry.
    fn names_a_part_of(&self, name: &str) -> bool {
        let ends: Vec<usize> = name.match_indices('.').map(|(at, _)| at).chain([name.len()]).collect();
        let starts = std::iter::once(0).chain(name.match_indices('.').map(|(at, _)| at + 1));
        starts.enumerate().any(|(part, start)| ends[part..].iter().any(|end| self.names.contains(&name[start..*end])))
    }
}

/// The parts of a name that count; all if none would be left.
fn inner(name: &str) -> String {
    let parts: Vec<&str> = name.split('.').filter(|part| !OUTER.contains(part)).collect();
    if parts.is_empty() { name.to_owned() } else { parts.join(".") }
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
    fn patterns_are_for_the_beginning_and_globs_for_the_whole() {
        assert!(has("re:.*lm_head", "model.lm_head") && has("re:visual.*", "model.visual.merger.mlp.0"));
        assert!(!has("re:down_proj", "layers.0.mlp.down_proj"), "a name begins with it or does not");
        assert!(has("model.layers.*.mlp.gate", "model.layers.7.mlp.gate"));
        assert!(!has("*.mlp.gate", "model.layers.7.mlp.gate_proj"));
        let error = Modules::new("config.json", ["re:(?=x)"]).expect_err("it looks ahead");
        assert!(error.to_string().starts_with("config.json: the pattern \"re:(?=x)\" of modules"), "{error}");
    }
}
