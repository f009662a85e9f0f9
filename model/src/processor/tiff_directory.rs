//! Pure: the first directory of a TIFF or BigTIFF (TIFF 6.0, section 2), including a TIFF inside
//! EXIF data. Values are read from the file on demand, so a directory takes no memory.

/// Maximum entries that are examined. Real directories have a few dozen.
const ENTRIES_MAX: u64 = 4096;

#[derive(Clone, Copy, Debug)]
pub(super) struct Directory<'a> {
    file: &'a [u8],
    is_little: bool,
    is_big: bool,
    // Offset of the first entry, and the number of entries.
    first: u64,
    entries: u64,
}

/// An entry: the type, number and position of its values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub kind: u16,
    pub count: u64,
    at: u64,
}

impl<'a> Directory<'a> {
    /// Returns `None` if the file is not a TIFF, or ends before the first entry. Truncated entries
    /// count as missing.
    pub fn read(file: &'a [u8]) -> Option<Self> {
        let is_little = file.starts_with(b"II");
        if !is_little && !file.starts_with(b"MM") {
            return None;
        }
        let mut found = Directory { file, is_little, is_big: false, first: 0, entries: 0 };
        found.is_big = match found.unsigned(2, 2)? {
            42 => false,
            43 if found.unsigned(4, 4)? == if is_little { 8 } else { 8 << 16 } => true,
            _ => return None,
        };
        let (directory, count_bytes) =
            if found.is_big { (found.unsigned(8, 8)?, 8) } else { (found.unsigned(4, 4)?, 2) };
        found.entries = found.unsigned(directory, count_bytes)?.min(ENTRIES_MAX);
        found.first = directory + count_bytes;
        Some(found)
    }

    pub fn is_little(&self) -> bool {
        self.is_little
    }

    /// The last entry with this tag, which is the entry that Pillow uses.
    pub fn entry(&self, tag: u16) -> Option<Entry> {
        let entry_bytes = if self.is_big { 20 } else { 12 };
        let tagged = |number: u64| {
            let at = self.first + number * entry_bytes;
            (self.unsigned(at, 2)? == u64::from(tag)).then(|| self.entry_at(at)).flatten()
        };
        (0..self.entries).rev().find_map(tagged)
    }

    fn entry_at(&self, at: u64) -> Option<Entry> {
        let kind = self.unsigned(at + 2, 2)? as u16;
        let (count, value, inline_bytes) =
            if self.is_big { (self.unsigned(at + 4, 8)?, at + 12, 8) } else { (self.unsigned(at + 4, 4)?, at + 8, 4) };
        let bytes = count.checked_mul(type_bytes(kind)?)?;
        let at = if bytes <= inline_bytes { value } else { self.unsigned(value, inline_bytes)? };
        let is_inside = at.checked_add(bytes)? <= self.file.len() as u64;
        is_inside.then_some(Entry { kind, count, at })
    }

    /// An integer value of an entry.
    pub fn number(&self, entry: &Entry, index: u64) -> Option<u64> {
        let bytes = type_bytes(entry.kind).filter(|_| index < entry.count)?;
        self.unsigned(entry.at + index * bytes, bytes)
    }

    /// The first integer value of a tag.
    pub fn first(&self, tag: u16) -> Option<u64> {
        self.number(&self.entry(tag)?, 0)
    }

    /// A RATIONAL value of a tag. `None` if its denominator is 0.
    pub fn rational(&self, tag: u16, index: u64) -> Option<f32> {
        let entry = self.entry(tag).filter(|entry| entry.kind == 5 && index < entry.count)?;
        let at = entry.at + index * 8;
        let divisor = self.unsigned(at + 4, 4)?;
        (divisor != 0).then_some(self.unsigned(at, 4)? as f32 / divisor as f32)
    }

    /// The bytes of an entry of any type.
    pub fn bytes(&self, entry: &Entry) -> Option<&'a [u8]> {
        let length = entry.count.checked_mul(type_bytes(entry.kind)?)?;
        self.file.get(usize::try_from(entry.at).ok()?..usize::try_from(entry.at.checked_add(length)?).ok()?)
    }

    fn unsigned(&self, at: u64, bytes: u64) -> Option<u64> {
        let at = usize::try_from(at).ok()?;
        let bytes = self.file.get(at..at.checked_add(bytes as usize)?)?;
        let join = |number: u64, byte: &u8| number << 8 | u64::from(*byte);
        Some(if self.is_little { bytes.iter().rev().fold(0, join) } else { bytes.iter().fold(0, join) })
    }
}

/// Bytes of a value by its type (TIFF 6.0, section 2; BigTIFF).
fn type_bytes(kind: u16) -> Option<u64> {
    match kind {
        1 | 2 | 6 | 7 => Some(1),
        3 | 8 => Some(2),
        4 | 9 | 11 | 13 => Some(4),
        5 | 10 | 12 | 16..=18 => Some(8),
        _ => None,
    }
}
