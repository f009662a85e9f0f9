//! Tests of `Bytes` and `Pages`: printing, parsing and arithmetic.

use bursar_budgets::*;
use proptest::prelude::*;

#[test]
fn bytes_print_rounded_or_exactly() {
    let texts: Vec<String> = [0, 1023, 1024, 1536, MIB - 1, 12 * MIB, GIB - 1, GIB, 80 * GIB]
        .iter()
        .map(|n| format!("{} = {}", Bytes(*n), Bytes(*n).exact()))
        .collect();
    let expected = [
        "0 B = 0 B",
        "1023 B = 1,023 B",
        "1.0 KiB = 1,024 B",
        "1.5 KiB = 1,536 B",
        "1.0 MiB = 1,048,575 B",
        "12.0 MiB = 12,582,912 B",
        "1.0 GiB = 1,073,741,823 B",
        "1.0 GiB = 1,073,741,824 B",
        "80.0 GiB = 85,899,345,920 B",
    ];
    assert_eq!(texts, expected);
    assert_eq!(format!("[{:>10}]", Bytes::mib(1)), "[   1.0 MiB]");
    assert_eq!((Pages(1).to_string(), Pages(1200).to_string()), ("1 page".into(), "1,200 pages".into()));
}

#[test]
fn invalid_byte_counts_are_refused_with_a_reason() {
    let says = |text: &str| text.parse::<Bytes>().unwrap_err().to_string();
    assert_eq!(says(""), "\"\" does not start with a number of bytes, such as 512MiB or 1048576");
    assert_eq!(says("MiB"), "\"MiB\" does not start with a number of bytes, such as 512MiB or 1048576");
    let units = "expected B, KiB, MiB, GiB or TiB, which are powers of 1,024";
    assert_eq!(says("12 MB"), format!("\"MB\" in \"12 MB\" is not a unit of bytes; {units}"));
    assert_eq!(says("1.0000001KiB"), "\"1.0000001KiB\" is not a whole number of bytes below 16 EiB");
    assert_eq!(says("99999999999GiB"), "\"99999999999GiB\" is not a whole number of bytes below 16 EiB");
    assert_eq!(says("-1"), "\"-1\" does not start with a number of bytes, such as 512MiB or 1048576");
    assert_eq!("1.5 GiB".parse(), Ok(Bytes::mib(1536)));
    assert_eq!(" 512m ".parse(), Ok(Bytes::mib(512)));
}

#[test]
#[should_panic(expected = "1 - 2 is below zero")]
fn subtracting_below_zero_panics() {
    let _ = Bytes(1) - Bytes(2);
}

#[test]
fn bytes_never_print_as_1024_of_a_unit() {
    let texts = [MIB - KIB / 20 - 1, MIB - KIB / 20, GIB - MIB / 20 - 1, GIB - MIB / 20].map(|n| Bytes(n).to_string());
    assert_eq!(texts, ["1023.9 KiB", "1.0 MiB", "1023.9 MiB", "1.0 GiB"]);
}

#[test]
fn every_byte_unit_is_parsed_in_full_and_by_letter() {
    for (unit, letter, bytes) in [("KiB", "k", KIB), ("MiB", "m", MIB), ("GiB", "g", GIB), ("TiB", "t", 1024 * GIB)] {
        assert_eq!(format!("3{unit}").parse(), Ok(Bytes(3 * bytes)));
        assert_eq!(format!("1.5 {letter}").parse(), Ok(Bytes(bytes + bytes / 2)));
    }
    assert_eq!((KIB, MIB, GIB), (1024, 1_048_576, 1_073_741_824));
    assert_eq!((Bytes::kib(3), Bytes::mib(3), Bytes::gib(3)), (Bytes(3 * KIB), Bytes(3 * MIB), Bytes(3 * GIB)));
    assert_eq!(("7 b".parse(), "1_0,0".parse()), (Ok(Bytes(7)), Ok(Bytes(100))));
}

#[test]
fn fractions_are_parsed_only_where_the_bytes_are_exact() {
    assert_eq!("8388608.0GiB".parse(), Ok(Bytes(1 << 53)));
    for text in ["8388608.5GiB", "99999999.0TiB", "0.3", "1.5"] {
        assert_eq!(text.parse::<Bytes>(), Err(ParseBytesError::OutOfRange { text: text.into() }));
    }
    assert_eq!("1.2.3KiB".parse::<Bytes>(), Err(ParseBytesError::NoNumber { text: "1.2.3KiB".into() }));
    let hint = "".parse::<Bytes>().unwrap_err().hint();
    assert_eq!(hint, "write a number and a unit, such as 512MiB, 2 GiB or 1.5GiB, or plain bytes, such as 1048576");
}

#[test]
fn checked_arithmetic_returns_none_and_saturating_arithmetic_clamps() {
    assert_eq!((Bytes(6).checked_mul(7), Bytes::MAX.checked_mul(2)), (Some(Bytes(42)), None));
    assert_eq!((Bytes(6).checked_add(Bytes(7)), Bytes::MAX.checked_add(Bytes(1))), (Some(Bytes(13)), None));
    assert_eq!((Bytes(7).checked_sub(Bytes(6)), Bytes(6).checked_sub(Bytes(7))), (Some(Bytes(1)), None));
    assert_eq!((Bytes(7).saturating_sub(Bytes(5)), Bytes(5).saturating_sub(Bytes(7))), (Bytes(2), Bytes::ZERO));
    assert_eq!((Bytes(7).saturating_add(Bytes(5)), Bytes::MAX.saturating_add(Bytes(1))), (Bytes(12), Bytes::MAX));
    assert_eq!((Bytes(42).as_usize(), Bytes::from(42), Pages(3).bytes(Bytes(14))), (42, Bytes(42), Bytes(42)));
}

#[test]
fn bytes_divide_by_numbers_and_by_bytes() {
    assert_eq!((Bytes(42) / 5, Bytes(42) / Bytes(5), Bytes(42).div_ceil(Bytes(5))), (Bytes(8), 8, 9));
    assert_eq!((Bytes(10).div_ceil(Bytes(5)), Bytes::ZERO.div_ceil(Bytes(5))), (2, 0));
    assert_eq!(
        (Bytes(1000).share(0.9), Bytes(3).share(0.5), Bytes(3).share(-1.0)),
        (Bytes(900), Bytes(1), Bytes::ZERO)
    );
    assert_eq!((Bytes(5).checked_round_up(Bytes(4)), Bytes::MAX.checked_round_up(Bytes(4))), (Some(Bytes(8)), None));
    assert_eq!((Bytes::of_slice(b"seven b"), Address(768).is_multiple_of(Bytes(256))), (Bytes(7), true));
    assert!(!Address(770).is_multiple_of(Bytes(256)));
}

#[test]
fn a_page_size_of_zero_panics() {
    for round in [Bytes::round_up, Bytes::round_down] {
        assert!(std::panic::catch_unwind(|| round(Bytes(1), Bytes::ZERO)).is_err());
    }
    let panicked = std::panic::catch_unwind(|| Bytes(1).pages(Bytes::ZERO)).unwrap_err();
    assert_eq!(panicked.downcast_ref(), Some(&"a page has at least one byte"));
    assert!(Bytes(6).is_multiple_of(Bytes(3)) && !Bytes(7).is_multiple_of(Bytes(3)));
}

proptest! {
    #[test]
    fn every_byte_count_is_unchanged_after_printing_and_parsing(n in any::<u64>(), mib in 0..1u64 << 40) {
        prop_assert_eq!(n.to_string().parse(), Ok(Bytes(n)));
        prop_assert_eq!(Bytes(n).exact().parse(), Ok(Bytes(n)));
        prop_assert_eq!(format!("{mib}MiB").parse(), Ok(Bytes::mib(mib)));
        let json = serde_json::to_string(&Bytes(n)).unwrap();
        prop_assert_eq!(&json, &n.to_string());
        prop_assert_eq!(serde_json::from_str::<Bytes>(&json).unwrap(), Bytes(n));
    }

    #[test]
    fn rounding_up_gives_the_smallest_sufficient_number_of_pages(n in 0..1u64 << 50, page in 1..1u64 << 22) {
        let (bytes, page) = (Bytes(n), Bytes(page));
        let up = bytes.round_up(page);
        prop_assert_eq!(up, bytes.pages(page).bytes(page));
        prop_assert!(up >= bytes && up - bytes < page && bytes - bytes.round_down(page) < page);
        prop_assert_eq!(up.is_multiple_of(page), true);
    }
}
