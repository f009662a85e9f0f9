//! Products of whole numbers, such as `1920*1080` for the size of a picture.

/// Multiplies whole numbers that are separated by `*`. A single number is valid too, and digits may
/// be separated by `_` or `,`. A number may end in `k`, `m` or `g` for thousands, millions and
/// billions, and may then have a decimal point. A number may also end in `K`, `M` or `G` for powers
/// of 1,024, as in vLLM. Returns `None` for anything else, or if the product exceeds a `u64`.
pub(super) fn product(typed: &str) -> Option<u64> {
    typed.split('*').try_fold(1u64, |product, factor| product.checked_mul(number(factor.trim())?))
}

fn number(typed: &str) -> Option<u64> {
    let typed = typed.replace(['_', ','], "");
    const UNITS: [(char, u64); 6] =
        [('k', 1000), ('m', 1_000_000), ('g', 1_000_000_000), ('K', 1 << 10), ('M', 1 << 20), ('G', 1 << 30)];
    let Some((digits, unit)) = UNITS.iter().find_map(|(letter, unit)| Some((typed.strip_suffix(*letter)?, *unit)))
    else {
        return typed.parse().ok();
    };
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    let is_decimal = unit.is_multiple_of(1000);
    if !is_decimal && digits.contains('.') || digits.ends_with('.') || fraction.len() > 9 {
        return None;
    }
    let parts = 10u64.checked_pow(fraction.len() as u32)?;
    let value: u64 = format!("{whole}{fraction}").parse().ok()?;
    let scaled = value.checked_mul(unit)?;
    scaled.is_multiple_of(parts).then_some(scaled / parts)
}

/// Replaces each product outside strings by its value, because a product is not valid JSON.
pub(super) fn with_products_multiplied(json: &str) -> String {
    let outside =
        |part: &str| -> String { part.split_inclusive([',', ':', '{', '}', '[', ']']).map(multiplied).collect() };
    let parts = json.split('"').enumerate();
    let parts = parts.map(|(place, part)| if place % 2 == 0 { outside(part) } else { part.to_owned() });
    parts.collect::<Vec<_>>().join("\"")
}

/// Replaces the product in one value, and keeps the character that ends the value.
fn multiplied(piece: &str) -> String {
    let value = piece.trim_end_matches([',', ':', '{', '}', '[', ']']);
    match product(value).filter(|_| value.contains('*')) {
        Some(product) => format!("{product}{}", &piece[value.len()..]),
        None => piece.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_numbers_and_products_of_integers_are_evaluated() {
        for (typed, expected) in [
            ("1920*1080", Some(2_073_600)),
            (" 1280 * 28*28 ", Some(1_003_520)),
            ("1_024", Some(1024)),
            ("2,048*2", Some(4096)),
            ("16k", Some(16_000)),
            ("16K", Some(16_384)),
            ("25.6k", Some(25_600)),
            ("1M*2", Some(2 << 20)),
            ("1.5K", None),
            ("1.0001k", None),
            ("k", None),
            (".k", None),
            ("1.k", None),
            ("1920*", None),
            ("*", None),
            ("-2*3", None),
            ("2.5*2", None),
            ("4294967296*4294967296", None),
        ] {
            assert_eq!(product(typed), expected, "{typed}");
        }
        for (json, expected) in [
            (r#"{"max_pixels": 1920*1080}"#, r#"{"max_pixels":2073600}"#),
            (
                r#"{"size": {"longest_edge":2*3 , "shortest_edge": 4 }}"#,
                r#"{"size": {"longest_edge":6, "shortest_edge": 4 }}"#,
            ),
            (r#"{"text": "2*3", "list": [2*3,7]}"#, r#"{"text": "2*3", "list": [6,7]}"#),
            (r#"{"max_pixels": 1920*x}"#, r#"{"max_pixels": 1920*x}"#),
        ] {
            assert_eq!(with_products_multiplied(json), expected);
        }
    }
}
