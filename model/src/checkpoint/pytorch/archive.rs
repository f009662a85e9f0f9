//! Locations of the entries of a zip archive. No entry is copied: torch stores entries without
//! compression so that they can be mapped. Lengths are checked against the bytes of the file, and
//! no count is trusted. The format: PKWARE's APPNOTE.TXT 6.3.10.

use std::collections::BTreeMap;
use std::ops::Range;

// Signature of each kind of record, and its size in bytes without names and extra fields.
const END: (&[u8], usize) = (b"PK\x05\x06", 22);
const END_64: (&[u8], usize) = (b"PK\x06\x06", 56);
const LOCATOR_64: (&[u8], usize) = (b"PK\x06\x07", 20);
const LISTED: (&[u8], usize) = (b"PK\x01\x02", 46);
const LOCAL: (&[u8], usize) = (b"PK\x03\x04", 30);

/// Maximum length of the comment after the end record, in bytes.
const COMMENT_MAX: usize = u16::MAX as usize;
/// A size or an offset with this value is stored in the extra field `EXTRA_64` instead.
const ELSEWHERE: u64 = u32::MAX as u64;
const EXTRA_64: u64 = 1;

/// The byte range of every entry, by name.
///
/// # Errors
/// A description of what is wrong with the archive.
pub(super) fn entries(file: &[u8]) -> Result<BTreeMap<&str, Range<usize>>, String> {
    let (mut at, count) = directory(file)?;
    let mut entries = BTreeMap::new();
    for _ in 0..count {
        let record = record(file, at, LISTED)?;
        let lengths = [28, 30, 32].map(|place| number(record, place, 2) as usize);
        let rest = at + LISTED.1;
        let name = file.get(rest..rest + lengths[0]).and_then(|name| std::str::from_utf8(name).ok());
        let name = name.ok_or_else(|| format!("the name at byte {rest} is cut off or not UTF-8"))?;
        let extra = file.get(rest + lengths[0]..rest + lengths[0] + lengths[1]).ok_or("an entry is cut off")?;
        if number(record, 8, 2) & 1 != 0 || number(record, 10, 2) != 0 {
            return Err(format!("the entry {name} is compressed or encrypted; torch stores entries as they are"));
        }
        let [whole, packed, offset] = sizes(record, extra).ok_or_else(|| format!("the sizes of {name} are missing"))?;
        if whole != packed {
            return Err(format!("the entry {name} is not compressed, but has the sizes {packed} and {whole}"));
        }
        entries.insert(name, content(file, offset, whole).map_err(|reason| format!("{name}: {reason}"))?);
        at = rest + lengths.iter().sum::<usize>();
    }
    Ok(entries)
}

/// The start of the list of entries, and the number of entries.
fn directory(file: &[u8]) -> Result<(usize, u64), String> {
    let earliest = file.len().saturating_sub(END.1 + COMMENT_MAX);
    let found = file[earliest..].windows(END.0.len()).rposition(|bytes| bytes == END.0);
    let end = earliest + found.ok_or("it has no end record; a partial download looks like this")?;
    let last = record(file, end, END)?;
    let (mut count, mut start) = (number(last, 10, 2), number(last, 16, 4));
    if let Some(locator) = end.checked_sub(LOCATOR_64.1).and_then(|at| record(file, at, LOCATOR_64).ok()) {
        let large = record(file, place(number(locator, 8, 8))?, END_64)?;
        (count, start) = (number(large, 32, 8), number(large, 48, 8));
    }
    Ok((place(start)?, count))
}

/// The number of bytes without and with compression, and the offset of the local header.
fn sizes(record: &[u8], mut extra: &[u8]) -> Option<[u64; 3]> {
    let mut sizes = [24, 20, 42].map(|place| number(record, place, 4));
    while extra.len() >= 4 {
        let (kind, length) = (number(extra, 0, 2), number(extra, 2, 2) as usize);
        let mut field = extra.get(4..4 + length)?;
        if kind == EXTRA_64 {
            for size in sizes.iter_mut().filter(|size| **size == ELSEWHERE) {
                *size = u64::from_le_bytes(*field.first_chunk()?);
                field = &field[8..];
            }
        }
        extra = &extra[4 + length..];
    }
    Some(sizes)
}

/// An entry's bytes, which follow its local header.
fn content(file: &[u8], offset: u64, bytes: u64) -> Result<Range<usize>, String> {
    let offset = place(offset)?;
    let local = record(file, offset, LOCAL)?;
    let start = offset + LOCAL.1 + number(local, 26, 2) as usize + number(local, 28, 2) as usize;
    let end = usize::try_from(bytes).ok().and_then(|bytes| start.checked_add(bytes));
    let end = end.filter(|end| *end <= file.len());
    Ok(start..end.ok_or_else(|| format!("its {bytes} bytes reach beyond the file"))?)
}

/// The fixed-size part of the record at byte `at`.
fn record<'f>(file: &'f [u8], at: usize, (signature, bytes): (&[u8], usize)) -> Result<&'f [u8], String> {
    let record = at.checked_add(bytes).and_then(|end| file.get(at..end));
    record.filter(|record| record.starts_with(signature)).ok_or_else(|| format!("there is no record at byte {at}"))
}

/// The little-endian number of `bytes` bytes at `at`.
fn number(record: &[u8], at: usize, bytes: usize) -> u64 {
    record[at..at + bytes].iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

fn place(offset: u64) -> Result<usize, String> {
    usize::try_from(offset).map_err(|_| format!("the offset {offset} is too large for this machine"))
}
