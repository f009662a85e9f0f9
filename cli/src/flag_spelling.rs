//! Other engines' spellings of flags, converted to ours.

use std::ffi::OsString;

/// Converts each flag to our spelling: an underscore counts as a hyphen, as in vLLM. Words after
/// `--` stay unchanged.
pub fn as_ours(words: impl IntoIterator<Item = OsString>) -> impl Iterator<Item = OsString> {
    let (mut are_flags, mut is_server) = (true, false);
    words.into_iter().map(move |word| {
        are_flags &= word != "--";
        is_server |= word == "serve";
        match word.to_str() {
            // For `serve`, this vLLM flag maps to --name, which accepts several names for a model.
            Some(text) if are_flags && is_server => match ours(text) {
                name if name == "--served-model-name" => "--name".into(),
                flag => flag.replacen("--served-model-name=", "--name=", 1).into(),
            },
            Some(text) if are_flags => ours(text).into(),
            _ => word,
        }
    })
}

fn ours(word: &str) -> String {
    let (name, value) = word.find('=').map_or((word, ""), |end| word.split_at(end));
    let name = match name {
        // clap cannot define a flag with one hyphen and two letters.
        "-tp" => "--tensor-parallel-size".to_owned(),
        _ if name.starts_with("--") => name.replace('_', "-"),
        _ => return word.to_owned(),
    };
    name + value
}

#[cfg(test)]
mod tests {
    use super::*;

    fn typed(line: &str) -> String {
        let words: Vec<_> = as_ours(line.split(' ').map(OsString::from)).collect();
        words.join(" ".as_ref()).into_string().expect("UTF-8")
    }

    #[test]
    fn vllm_flag_spellings_are_accepted() {
        assert_eq!(
            typed("bursar serve -tp 2 --max_model_len=4096"),
            "bursar serve --tensor-parallel-size 2 --max-model-len=4096"
        );
        assert_eq!(typed("x -tp=2 --swap_space 4"), "x --tensor-parallel-size=2 --swap-space 4");
        assert_eq!(typed("x serve --served-model-name a b"), "x serve --name a b");
        assert_eq!(typed("x chat --served_model_name=a"), "x chat --served-model-name=a");
    }

    #[test]
    fn values_of_flags_are_not_respelled() {
        for line in ["x --model a_b/c_d", "x --knobs=my_file.json -m a_b", "x -t -- --not_a_flag -tp"] {
            assert_eq!(typed(line), line);
        }
    }
}
