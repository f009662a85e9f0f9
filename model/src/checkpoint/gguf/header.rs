//! The header of a GGUF file: its settings by name, and the location of each tensor. Nothing is
//! copied, no count is trusted, and every length is checked against the bytes of the file.
//!
//! The format: ggml-org/ggml, `docs/gguf.md`, versions 2 and 3, little-endian.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::checkpoint::layout::TEXT_BYTES_MAX;

// Limits for the content of a header: more than any real file needs, and small
// enough to bound memory.
const SETTINGS_MAX: u64 = 1 << 16;
const TENSORS_MAX: u64 = 1 << 17;
const AXES_MAX: u32 = 4;

const ALIGNMENT: &str = "general.alignment";
const ALIGNMENT_DEFAULT: u64 = 32;

/// The value of a setting.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Setting<'f> {
    /// An integer from u8 to u64.
    Unsigned(u64),
    /// An integer from i8 to i64.
    Signed(i64),
    /// An f32 or f64 number.
    Float(f64),
    Bool(bool),
    Text(&'f str),
    List(List<'f>),
}

/// A list of values of one type. All values were checked when the header was read, and no value is
/// copied.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct List<'f> {
    kind: u32,
    count: u64,
    bytes: &'f [u8],
}

/// The entry of a tensor in the header.
#[derive(Debug, PartialEq)]
pub struct TensorEntry<'f> {
    pub name: &'f str,
    /// Slowest axis first, as everywhere in this crate. The file has the reverse order.
    pub shape: Vec<usize>,
    /// ggml's number for the element type.
    pub kind: u32,
    /// Bytes from the start of the tensors' data.
    pub offset: u64,
}

#[derive(Debug)]
pub struct Header<'f> {
    pub settings: BTreeMap<&'f str, Setting<'f>>,
    pub tensors: Vec<TensorEntry<'f>>,
    /// The byte range of the list of tensors.
    pub listing: Range<usize>,
    /// The byte at which the tensors' data starts.
    pub data: usize,
    /// Each tensor's offset is a multiple of this number of bytes.
    pub alignment: u64,
}

impl<'f> Header<'f> {
    /// Reads the header at the start of `file`.
    ///
    /// # Errors
    /// A description of what is wrong with the header.
    pub fn read(file: &'f [u8]) -> Result<Self, String> {
        let mut from = Cursor { file, at: 0 };
        if from.take(4)? != b"GGUF" {
            return Err("it does not begin with GGUF".to_owned());
        }
        match from.u32()? {
            2 | 3 => {}
            version if [2, 3].contains(&version.swap_bytes()) => return Err("its bytes are big-endian".to_owned()),
            version => return Err(format!("its version is {version}; supported: 2 and 3")),
        }
        let tensors = from.count("tensors", TENSORS_MAX)?;
        let settings = from.settings()?;
        let alignment = match settings.get(ALIGNMENT) {
            None => ALIGNMENT_DEFAULT,
            Some(Setting::Unsigned(bytes)) if bytes.is_power_of_two() && *bytes <= 1 << 20 => *bytes,
            Some(other) => return Err(format!("{ALIGNMENT} is {other}, not a power of two up to 1 MiB")),
        };
        let start = from.at;
        let tensors = (0..tensors).map(|_| from.tensor()).collect::<Result<Vec<_>, _>>()?;
        let listing = start..from.at;
        let data = from.at.next_multiple_of(alignment as usize);
        Ok(Header { settings, tensors, listing, data, alignment })
    }
}

/// A reader that moves forward and never reads beyond the end.
struct Cursor<'f> {
    file: &'f [u8],
    at: usize,
}

impl<'f> Cursor<'f> {
    fn take(&mut self, bytes: u64) -> Result<&'f [u8], String> {
        let end = usize::try_from(bytes).ok().and_then(|bytes| self.at.checked_add(bytes));
        if end.is_some_and(|end| end > TEXT_BYTES_MAX as usize && end <= self.file.len()) {
            return Err(format!("it has more bytes than the limit of {TEXT_BYTES_MAX}"));
        }
        let taken = end.and_then(|end| self.file.get(self.at..end));
        let taken = taken.ok_or_else(|| format!("{bytes} bytes should follow byte {}, but the file ends", self.at))?;
        self.at += taken.len();
        Ok(taken)
    }

    fn array<const SIZE: usize>(&mut self) -> Result<[u8; SIZE], String> {
        Ok(self.take(SIZE as u64)?.try_into().expect("the slice has the requested size"))
    }

    fn u32(&mut self) -> Result<u32, String> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, String> {
        self.array().map(u64::from_le_bytes)
    }

    fn count(&mut self, of: &str, most: u64) -> Result<u64, String> {
        match self.u64()? {
            count if count > most => Err(format!("it claims {count} {of}; the limit is {most}")),
            count => Ok(count),
        }
    }

    fn text(&mut self) -> Result<&'f str, String> {
        let (at, bytes) = (self.at, self.u64()?);
        std::str::from_utf8(self.take(bytes)?).map_err(|_| format!("the text at byte {at} is not UTF-8"))
    }

    fn settings(&mut self) -> Result<BTreeMap<&'f str, Setting<'f>>, String> {
        let mut settings = BTreeMap::new();
        for _ in 0..self.count("settings", SETTINGS_MAX)? {
            let (name, kind) = (self.text()?, self.u32()?);
            let value = if kind == LIST { Setting::List(self.list()?) } else { self.setting(kind)? };
            if settings.insert(name, value).is_some() {
                return Err(format!("it has the setting {name} twice"));
            }
        }
        Ok(settings)
    }

    fn setting(&mut self, kind: u32) -> Result<Setting<'f>, String> {
        Ok(match kind {
            0 => Setting::Unsigned(self.array::<1>()?[0].into()),
            1 => Setting::Signed(i8::from_le_bytes(self.array()?).into()),
            2 => Setting::Unsigned(u16::from_le_bytes(self.array()?).into()),
            3 => Setting::Signed(i16::from_le_bytes(self.array()?).into()),
            4 => Setting::Unsigned(self.u32()?.into()),
            5 => Setting::Signed(i32::from_le_bytes(self.array()?).into()),
            6 => Setting::Float(f32::from_le_bytes(self.array()?).into()),
            7 => match self.array::<1>()? {
                [truth @ (0 | 1)] => Setting::Bool(truth == 1),
                [other] => return Err(format!("the boolean at byte {} is {other}", self.at - 1)),
            },
            8 => Setting::Text(self.text()?),
            10 => Setting::Unsigned(self.u64()?),
            11 => Setting::Signed(i64::from_le_bytes(self.array()?)),
            12 => Setting::Float(f64::from_le_bytes(self.array()?)),
            LIST => return Err(format!("it has a list of lists at byte {}", self.at)),
            other => return Err(format!("the setting at byte {} has the unknown type {other}", self.at)),
        })
    }

    /// Reads a whole list once, to check that it is complete and valid.
    fn list(&mut self) -> Result<List<'f>, String> {
        let (kind, count, start) = (self.u32()?, self.u64()?, self.at);
        for _ in 0..count {
            self.setting(kind)?;
        }
        Ok(List { kind, count, bytes: &self.file[start..self.at] })
    }

    fn tensor(&mut self) -> Result<TensorEntry<'f>, String> {
        let (name, axes) = (self.text()?, self.u32()?);
        if !(1..=AXES_MAX).contains(&axes) {
            return Err(format!("the tensor {name} has {axes} axes; expected from 1 to {AXES_MAX}"));
        }
        let extent = |extent: u64| usize::try_from(extent).ok().filter(|extent| *extent > 0);
        let mut shape = Vec::new();
        for _ in 0..axes {
            let found = self.u64()?;
            shape.push(extent(found).ok_or_else(|| format!("the tensor {name} has an axis of {found} elements"))?);
        }
        shape.reverse();
        Ok(TensorEntry { name, shape, kind: self.u32()?, offset: self.u64()? })
    }
}

/// The type number of a list.
const LIST: u32 = 9;

impl<'f> List<'f> {
    pub fn iter(&self) -> impl Iterator<Item = Setting<'f>> {
        let (mut from, kind) = (Cursor { file: self.bytes, at: 0 }, self.kind);
        (0..self.count).map(move |_| from.setting(kind).expect("the list was checked when the header was read"))
    }
}

/// Formats a list as its length, a text as at most its first 60 characters, and any other value as
/// the value itself.
impl std::fmt::Display for Setting<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Setting::Unsigned(value) => value.fmt(formatter),
            Setting::Signed(value) => value.fmt(formatter),
            Setting::Float(value) => value.fmt(formatter),
            Setting::Bool(value) => value.fmt(formatter),
            Setting::Text(text) => text.chars().take(60).collect::<String>().fmt(formatter),
            Setting::List(list) => write!(formatter, "a list of {}", list.count),
        }
    }
}
