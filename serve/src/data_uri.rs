//! Lenient parsing of `data:` URIs (RFC 2397) and base64 (RFC 2045, RFC 4648). Base64 may contain
//! line breaks and percent-encoding, may use either alphabet, and may lack padding.

use base64::{
    DecodeError, Engine,
    alphabet::STANDARD as ALPHABET,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig, general_purpose::STANDARD},
};
use percent_encoding::percent_decode_str;

const IN_BETWEEN: GeneralPurpose = engine(DecodePaddingMode::RequireNone);
/// Engine for the last chunk. Padding may be missing, and the last character may have unused bits
/// that are not zero, as in Python's decoder.
const LAST: GeneralPurpose = engine(DecodePaddingMode::Indifferent);

const fn engine(padding: DecodePaddingMode) -> GeneralPurpose {
    let config = GeneralPurposeConfig::new().with_decode_padding_mode(padding).with_decode_allow_trailing_bits(true);
    GeneralPurpose::new(&ALPHABET, config)
}

/// A parsed data URI.
pub(super) struct DataUri<'u> {
    /// The media type in lower case, without parameters.
    pub(super) media_type: String,
    pub(super) is_base64: bool,
    pub(super) body: &'u str,
}

impl<'u> DataUri<'u> {
    /// Parses the part after `data:`. Returns `None` if there is no comma.
    pub(super) fn read(rest: &'u str) -> Option<Self> {
        let (head, body) = rest.split_once(',')?;
        let mut parts = head.split(';').map(|part| part.trim_ascii().to_ascii_lowercase());
        let media_type = parts.next().unwrap_or_default();
        let is_base64 = parts.next_back().is_some_and(|last| last == "base64");
        Some(DataUri { media_type, is_base64, body })
    }
}

/// Decodes strict or lenient base64.
///
/// # Errors
/// The text has a character that is neither in a base64 alphabet nor white space, or its length is
/// impossible in base64.
pub(super) fn base64(text: &str) -> Result<Vec<u8>, DecodeError> {
    // Strict base64, the common case, is decoded at once.
    STANDARD.decode(text.trim_ascii()).or_else(|_| lenient(text))
}

/// Cleans and decodes the text in chunks. A cleaned copy of the whole text would use memory
/// that is not reserved.
fn lenient(text: &str) -> Result<Vec<u8>, DecodeError> {
    /// Characters per chunk: a multiple of 4, the length of a base64 group.
    const CHUNK: usize = 4096;
    let mut decoded = Vec::with_capacity(text.len() / 4 * 3 + 3);
    let (mut chunk, mut done) = (Vec::with_capacity(CHUNK), 0);
    for byte in percent_decode_str(text).filter(|byte| !byte.is_ascii_whitespace()) {
        if chunk.len() == CHUNK {
            IN_BETWEEN.decode_vec(&chunk, &mut decoded).map_err(|error| moved(error, done))?;
            done += CHUNK;
            chunk.clear();
        }
        chunk.push(match byte {
            b'-' => b'+',
            b'_' => b'/',
            byte => byte,
        });
    }
    LAST.decode_vec(&chunk, &mut decoded).map_err(|error| moved(error, done))?;
    Ok(decoded)
}

/// Returns the error with its offset in the whole text, not counting white space.
fn moved(error: DecodeError, done: usize) -> DecodeError {
    match error {
        DecodeError::InvalidByte(at, byte) => DecodeError::InvalidByte(at + done, byte),
        DecodeError::InvalidLastSymbol(at, byte) => DecodeError::InvalidLastSymbol(at + done, byte),
        DecodeError::InvalidLength(length) => DecodeError::InvalidLength(length + done),
        DecodeError::InvalidPadding => DecodeError::InvalidPadding,
    }
}

#[cfg(test)]
mod tests {
    use base64::engine::general_purpose::{URL_SAFE, URL_SAFE_NO_PAD};

    use super::*;

    #[test]
    fn base64_variants_decode_to_the_same_bytes() {
        // The base64 text fills more than two chunks.
        let bytes: Vec<u8> = (0..=255).cycle().take(7000).chain([0xfb, 0xff, 0xbf]).collect();
        for length in [7003, 7002, 7001, 6145, 6144, 6143, 3073, 3072, 3071, 259, 258, 257, 1] {
            let bytes = &bytes[bytes.len() - length..];
            let strict = STANDARD.encode(bytes);
            let in_lines: Vec<_> =
                strict.as_bytes().chunks(76).map(|line| str::from_utf8(line).expect("base64 is ASCII")).collect();
            let percent: String = strict.bytes().map(|byte| format!("%{byte:02X}")).collect();
            for text in [
                strict.clone(),
                in_lines.join("\n"),
                in_lines.join("\r\n") + "\r\n",
                in_lines.join("%0A"),
                strict.trim_end_matches('=').to_owned(),
                URL_SAFE.encode(bytes),
                URL_SAFE_NO_PAD.encode(bytes),
                percent,
                strict.replace('+', "%2B").replace('/', "%2f").replace('=', "%3D"),
                format!("  {strict} "),
                format!("\t{}", strict.chars().map(|digit| format!("{digit} ")).collect::<String>()),
            ] {
                assert_eq!(base64(&text).as_deref(), Ok(bytes), "{text}");
            }
        }
        for text in ["A", "AAAA=AAA", "AA*A", "AA%2", "äAAA", "A===", "AAAAA", "===="] {
            assert!(base64(text).is_err(), "{text}");
            // The invalid text is also an error after a valid chunk.
            assert!(base64(&format!("{} {text}", "A".repeat(4096))).is_err(), "{text}");
        }
        assert!(base64(&format!("{}== AAAA", "A".repeat(4094))).is_err());
        let late = base64(&format!("{}\n*AAA", "A".repeat(5000)));
        assert_eq!(late, Err(DecodeError::InvalidByte(5000, b'*')));
    }

    #[test]
    fn data_uri_headers_may_have_any_case_parameters_and_spaces() {
        for (rest, expected) in [
            ("image/png;base64,AA", Some(("image/png", true, "AA"))),
            ("IMAGE/PNG;BASE64,AA", Some(("image/png", true, "AA"))),
            ("image/png; base64,AA", Some(("image/png", true, "AA"))),
            (" image/png ; name=a.png;base64 ,AA,B", Some(("image/png", true, "AA,B"))),
            (";base64,AA", Some(("", true, "AA"))),
            ("base64,AA", Some(("base64", false, "AA"))),
            (",%41", Some(("", false, "%41"))),
            ("image/png;base64", None),
        ] {
            let read = DataUri::read(rest);
            let read = read.as_ref().map(|uri| (uri.media_type.as_str(), uri.is_base64, uri.body));
            assert_eq!(read, expected, "{rest}");
        }
    }
}
