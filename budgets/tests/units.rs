//! Stories of bytes as text and as numbers.

use bursar_budgets::*;
use proptest::prelude::*;

#[test]
fn bytes_print_for_people_and_exactly() {
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
fn what_is_no_number_of_bytes_says_why() {
    let says = |text: &str| text.parse::<Bytes>().unwrap_err().to_string();
    assert_eq!(says(""), "\"\" does not start with a number of bytes, such as 512MiB or 1048576");
    assert_eq!(says("MiB"), "\"MiB\" does not start with a number of bytes, such as 512MiB or 1048576");
    let units = "there are B, KiB, MiB, GiB and TiB, which are powers of 1,024";
    assert_eq!(says("12 MB"), format!("\"MB\" in \"12 MB\" is no unit of bytes; {units}"));
    assert_eq!(says("1.0000001KiB"), "\"1.0000001KiB\" is not a whole number of bytes below 16 EiB");
    assert_eq!(says("99999999999GiB"), "\"99999999999GiB\" is not a whole number of bytes below 16 EiB");
    assert_eq!(says("-1"), "\"-1\" does not start with a number of bytes, such as 512MiB or 1048576");
    assert_eq!("1.5 GiB".parse(), Ok(Bytes::mib(1536)));
    assert_eq!(" 512m ".parse(), Ok(Bytes::mib(512)));
}

#[test]
#[should_panic(expected = "1 - 2 is below nothing")]
fn going_below_nothing_is_our_bug() {
    let _ = Bytes(1) - Bytes(2);
}

proptest! {
    #[test]
    fn every_number_of_bytes_survives_being_written_and_read(n in any::<u64>(), mib in 0..1u64 << 40) {
        prop_assert_eq!(n.to_string().parse(), Ok(Bytes(n)));
        prop_assert_eq!(Bytes(n).exact().parse(), Ok(Bytes(n)));
        prop_assert_eq!(format!("{mib}MiB").parse(), Ok(Bytes::mib(mib)));
        let json = serde_json::to_string(&Bytes(n)).unwrap();
        prop_assert_eq!(&json, &n.to_string());
        prop_assert_eq!(serde_json::from_str::<Bytes>(&json).unwrap(), Bytes(n));
    }

    #[test]
    fn rounding_up_is_the_smallest_number_of_pages_that_holds_it(n in 0..1u64 << 50, page in 1..1u64 << 22) {
        let (bytes, page) = (Bytes(n), Bytes(page));
        let up = bytes.round_up(page);
        prop_assert_eq!(up, bytes.pages(page).bytes(page));
        prop_assert!(up >= bytes && up - bytes < page && bytes - bytes.round_down(page) < page);
        prop_assert_eq!(up.is_multiple_of(page), true);
    }
}
