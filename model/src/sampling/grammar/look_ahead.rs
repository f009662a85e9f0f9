//! Rewriting of patterns with look-ahead, as Pydantic and Zod generate them, to several patterns
//! without look-ahead. The grammar compiler does not support look-ahead, but it can require a text
//! to match several patterns.

use std::fmt::Write;

use regex_syntax::hir::{Class, ClassUnicode, ClassUnicodeRange, Hir, HirKind, Look};

/// Patterns whose intersection matches the same texts as `pattern`, if all its look-aheads are at
/// the start. `None` if the pattern has no look-ahead, or a look-ahead that cannot be rewritten.
pub(super) fn without_look_ahead(pattern: &str) -> Option<Vec<String>> {
    let mut rest = pattern.strip_prefix('^')?;
    let mut patterns = Vec::new();
    while let Some(inner) = rest.strip_prefix("(?=").or_else(|| rest.strip_prefix("(?!")) {
        let end = end_of_group(inner)?;
        let ahead = &inner[..end];
        patterns.push(match rest.as_bytes()[2] {
            b'=' => format!("^(?:{ahead})"),
            _ => complement(ahead)?,
        });
        rest = &inner[end + 1..];
    }
    // A look-ahead applies only to its own alternative.
    if patterns.is_empty() || has_alternatives(rest) {
        return None;
    }
    patterns.push(format!("^{rest}"));
    Some(patterns)
}

/// The byte offset of the parenthesis that closes a group whose content begins at
/// the start of `text`.
fn end_of_group(text: &str) -> Option<usize> {
    plain(text).find(|(_, _, depth)| *depth < 0).map(|(at, ..)| at)
}

fn has_alternatives(text: &str) -> bool {
    plain(text).any(|(_, byte, depth)| depth == 0 && byte == b'|')
}

/// The bytes that are neither escaped nor in a character class, each with its offset and the number
/// of groups that are open after the byte.
fn plain(text: &str) -> impl Iterator<Item = (usize, u8, i32)> {
    // `classes` is the nesting depth of character classes, as in `[a[b]]`. A `]` directly after `[`
    // or `[^` is a literal.
    let (mut is_escaped, mut classes, mut at_class_start, mut last) = (false, 0usize, false, 0);
    let plain = text.bytes().enumerate().filter(move |(_, byte)| {
        let was_special = is_escaped || classes > 0;
        let is_real = !is_escaped;
        let is_first = std::mem::take(&mut at_class_start);
        is_escaped = is_real && *byte == b'\\';
        match byte {
            b'[' if is_real => (classes, at_class_start) = (classes + 1, true),
            b'^' if is_first && last == b'[' => at_class_start = true,
            b']' if is_real && !is_first => classes = classes.saturating_sub(1),
            _ => {}
        }
        last = *byte;
        !was_special && !is_escaped && classes == 0
    });
    plain.scan(0, |depth, (at, byte)| {
        *depth += i32::from(byte == b'(') - i32::from(byte == b')');
        Some((at, byte, *depth))
    })
}

/// A pattern that matches exactly the texts whose beginning `ahead` does not match.
fn complement(ahead: &str) -> Option<String> {
    let parsed = regex_syntax::parse(ahead).ok()?;
    let mut parts = parts_of(parsed.kind());
    if let Some(PatternPart::Start) = parts.first() {
        parts.remove(0);
    }
    let ends = matches!(parts.last(), Some(PatternPart::End));
    parts.truncate(parts.len() - usize::from(ends));
    match parts.as_slice() {
        // `ahead` matches texts that consist of characters of `of`. All other texts have a
        // character outside `of`, or are empty although at least one character is required.
        [PatternPart::Many { of, least }] if ends => {
            let other = class(&negated(of));
            Some(if *least == 0 { other } else { format!("^$|{other}") })
        }
        // `ahead` finds `found` anywhere in a text of one line. All other texts do not contain
        // `found`.
        [PatternPart::Many { of, least: 0 }, found @ ..] if !ends && takes_a_line(of) => lacks(found),
        begun => begins_otherwise(begun, ends),
    }
}

enum PatternPart {
    Start,
    End,
    One(ClassUnicode),
    /// At least `least` characters of the class `of`.
    Many {
        of: ClassUnicode,
        least: u32,
    },
    Other,
}

fn parts_of(kind: &HirKind) -> Vec<PatternPart> {
    match kind {
        HirKind::Concat(all) => all.iter().flat_map(|one| parts_of(one.kind())).collect(),
        HirKind::Capture(group) => parts_of(group.sub.kind()),
        HirKind::Look(Look::Start) => vec![PatternPart::Start],
        HirKind::Look(Look::End) => vec![PatternPart::End],
        HirKind::Literal(text) => match str::from_utf8(&text.0) {
            Ok(text) => text.chars().map(|one| PatternPart::One(class_of(one))).collect(),
            Err(_) => vec![PatternPart::Other],
        },
        HirKind::Class(Class::Unicode(of)) => vec![PatternPart::One(of.clone())],
        HirKind::Repetition(repeated) if repeated.max.is_none() && repeated.min <= 1 => match single(&repeated.sub) {
            Some(of) => vec![PatternPart::Many { of, least: repeated.min }],
            None => vec![PatternPart::Other],
        },
        _ => vec![PatternPart::Other],
    }
}

fn single(hir: &Hir) -> Option<ClassUnicode> {
    match parts_of(hir.kind()).as_slice() {
        [PatternPart::One(of)] => Some(of.clone()),
        _ => None,
    }
}

/// Whether the class is `.`, with or without the line end.
fn takes_a_line(of: &ClassUnicode) -> bool {
    let left = negated(of);
    left.ranges().is_empty() || left == class_of('\n')
}

fn class_of(one: char) -> ClassUnicode {
    ClassUnicode::new([ClassUnicodeRange::new(one, one)])
}

fn negated(of: &ClassUnicode) -> ClassUnicode {
    let mut negated = of.clone();
    negated.negate();
    negated
}

fn union(one: &ClassUnicode, other: &ClassUnicode) -> ClassUnicode {
    let mut all = one.clone();
    all.union(other);
    all
}

/// A pattern that matches exactly the texts that do not contain `parts`. `None` unless `parts` is
/// one character, or two adjacent characters from equal or disjoint classes.
fn lacks(parts: &[PatternPart]) -> Option<String> {
    match parts {
        [PatternPart::One(of)] => Some(format!("^{}*$", class(&negated(of)))),
        [PatternPart::One(first), PatternPart::One(then)] => {
            let mut both = first.clone();
            both.intersect(then);
            let one = class(first);
            if first == then {
                return Some(format!("^(?:{one}?{other})*{one}?$", other = class(&negated(first))));
            }
            let neither = class(&negated(&union(first, then)));
            let after_other = class(&negated(first));
            both.ranges().is_empty().then(|| format!("^(?:{after_other}|{one}+{neither})*{one}*$"))
        }
        _ => None,
    }
}

/// A pattern that matches exactly the texts that do not begin with these characters.
fn begins_otherwise(parts: &[PatternPart], ends: bool) -> Option<String> {
    // If the look-ahead ends with `$`, the look-ahead does not match a longer text either.
    let mut otherwise = ends.then(|| "(?s:.)".to_owned());
    for part in parts.iter().rev() {
        let PatternPart::One(of) = part else { return None };
        let (this, other) = (class(of), class(&negated(of)));
        let here = format!("$|{other}");
        otherwise = Some(otherwise.map_or(here.clone(), |rest| format!("{here}|{this}(?:{rest})")));
    }
    otherwise.map(|otherwise| format!("^(?:{otherwise})"))
}

/// A character class in regular expression syntax.
fn class(of: &ClassUnicode) -> String {
    let mut text = "[".to_owned();
    for range in of.ranges() {
        let (start, end) = (u32::from(range.start()), u32::from(range.end()));
        write!(text, r"\x{{{start:x}}}-\x{{{end:x}}}").expect("writing to a String cannot fail");
    }
    if of.ranges().is_empty() { r"[^\x{0}-\x{10ffff}]".to_owned() } else { text + "]" }
}

#[cfg(test)]
mod tests {
    use regex::Regex;

    use super::*;

    /// All texts up to a length over these letters.
    fn texts(letters: &str, length: usize) -> Vec<String> {
        let mut all = vec![String::new()];
        let mut last = all.clone();
        for _ in 0..length {
            last = last.iter().flat_map(|text| letters.chars().map(move |one| format!("{text}{one}"))).collect();
            all.extend(last.iter().cloned());
        }
        all
    }

    #[test]
    fn pydantic_and_zod_patterns_match_equally_without_look_ahead() {
        // The expected result combines the separate results of each look-ahead and of the rest.
        type Says = fn(&str) -> bool;
        let rest = |pattern: &str, text: &str| Regex::new(pattern).expect("a pattern").is_match(text);
        let cases: [(&str, &str, Says, &str); 13] = [
            (
                r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$",
                r"^[+-]?0*\d*\.?\d*$",
                |text| !text.chars().all(|one| "-+.".contains(one)),
                "-+.07a",
            ),
            (
                r"^(?!\.)(?!.*\.\.)([a'.]*)[a]@([b]+\.)+[a-b]{1,}$",
                r"^([a'.]*)[a]@([b]+\.)+[a-b]{1,}$",
                |text| !text.starts_with('.') && !text.contains(".."),
                "a.@b",
            ),
            (r"^(?=.*[A-Z])(?=.*\d)\w{2,}$", r"^\w{2,}$", |text| text.contains('Q') && text.contains('7'), "Q7a-"),
            (r"^(?!ab)\w*$", r"^\w*$", |text| !text.starts_with("ab"), "abc"),
            (r"^(?!ab$)\w*$", r"^\w*$", |text| text != "ab", "abc"),
            (r"^(?!.*[|)])a", "^a", |text| !text.contains(['|', ')']), "a|)"),
            (r"^(?!.*ab)[abc]*$", r"^[abc]*$", |text| !text.contains("ab"), "abc"),
            (r"^(?![\(\]]+$)x?[(\]]*$", r"^x?[(\]]*$", |text| text.is_empty() || text.contains('x'), "(]x"),
            (r"^(?!$)a*$", r"^a*$", |text| !text.is_empty(), "a"),
            (r"^(?![])]b)[])b]*$", r"^[])b]*$", |text| !text.starts_with("]b") && !text.starts_with(")b"), "])b"),
            (r"^(?![^])]b)[])b]*$", r"^[])b]*$", |text| !text.starts_with("bb"), "])b"),
            (r"^(?![^^]b)[ab^]*$", r"^[ab^]*$", |text| !text.starts_with("ab") && !text.starts_with("bb"), "ab^"),
            (r"^(?![a[b)]])[ab)|]*$", r"^[ab)|]*$", |text| text.is_empty() || text.starts_with('|'), "ab)|"),
        ];
        for (pattern, base, says, letters) in cases {
            let patterns = without_look_ahead(pattern).unwrap_or_else(|| panic!("{pattern}"));
            let compiled: Vec<_> = patterns.iter().map(|one| Regex::new(one).expect("a pattern")).collect();
            for text in texts(letters, 5) {
                let expected = rest(base, &text) && says(&text);
                let found = compiled.iter().all(|one| one.is_match(&text));
                assert_eq!(found, expected, "{pattern} as {patterns:?} on {text}");
            }
        }
    }

    #[test]
    fn unsupported_look_aheads_are_not_rewritten() {
        for pattern in [
            "^a(?!b)c$",
            "(?!a)b",
            "^(?!a)b|c",
            "^(?!a|bc)d",
            "^(?!c)[^^]*b|c$",
            "^(?!(ab)+)c",
            "^(?!a",
            r"^\(?!a",
            "^a$",
            "",
            "^(?<!a)b",
            "^(?!.*a.*b)c",
            "^(?![^a]*bb)c",
        ] {
            assert_eq!(without_look_ahead(pattern), None, "{pattern}");
        }
    }
}
