//! Translation of the library's names in error messages to names that clients know: request
//! fields and server flags.

/// Settings of a model that error messages mention, with their flags.
const FLAGS: [(&str, &str); 12] = [
    ("`ImageLimits::bytes_max`", "--picture-file-bytes"),
    ("`ImageLimits::pixels_max`", "--picture-source-pixels"),
    ("`requests`", "--requests"),
    ("`context_tokens`", "--max-model-len"),
    ("`pictures`", "--pictures"),
    ("`picture_patches`", "--picture-patches"),
    ("`video_frames`", "--video-frames"),
    ("`host_bytes`", "--host-bytes"),
    ("`wake_within`", "--wake-within"),
    ("`queue_deadline`", "--queue-deadline"),
    ("`first_token_deadline`", "--first-token-deadline"),
    ("`reply_deadline`", "--reply-deadline"),
];

/// Other text in error messages, with its replacement for clients.
const FIELDS: [(&str, &str); 2] =
    [("`ignore_end`", "`ignore_eos`"), ("set `reply_format`", "set `tool_choice` to auto")];

/// Replaces the library's names in `text` with names that clients know.
pub(super) fn for_clients(text: &str) -> String {
    let mut name = text.to_owned();
    for (ours, flag) in FLAGS {
        if name.contains(ours) {
            name = name.replace(&format!("raise {ours}"), &format!("start the server with a larger {flag}"));
            name = name.replace(ours, flag);
        }
    }
    FIELDS.iter().fold(name, |name, (ours, theirs)| name.replace(ours, theirs))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hints_name_server_flags_and_request_fields() {
        for (ours, theirs) in [
            ("ask again, or raise `requests`", "ask again, or start the server with a larger --requests"),
            (
                "or raise `pictures` or `picture_patches`",
                "or start the server with a larger --pictures or --picture-patches",
            ),
            ("raise `ImageLimits::pixels_max`", "start the server with a larger --picture-source-pixels"),
            ("leave out `ignore_end`", "leave out `ignore_eos`"),
            ("`max_tokens` is 0", "`max_tokens` is 0"),
        ] {
            assert_eq!(for_clients(ours), theirs);
        }
    }
}
