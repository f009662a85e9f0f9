//! Pure: decoding of fax rows (ITU-T T.4 and T.6, TIFF 6.0, sections 10 and 11) to one bit per
//! pixel, where 1 is black. The code tables are from the crate `fax`. That crate's own loops
//! support neither two-dimensional Group 3 nor rows without end-of-line codes.

use std::convert::Infallible;
use std::iter::{Chain, Cloned, Map, RepeatN, repeat_n};
use std::slice::Iter;

use fax::maps::{Mode, black, mode, white};
use fax::{BitReader, ByteReader};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Coding {
    /// Run lengths. Each row begins at a byte boundary.
    Runs,
    /// Run lengths. Each row begins at a two-byte boundary.
    RunsByWord,
    /// Group 3: run lengths. If the flag is set, a row may also be coded relative to the row above.
    Group3 {
        is_two_dimensional: bool,
    },
    Group4,
}

/// Number of zero bits that identify an end-of-line code. No other code begins with 8 zeros.
const FILL_BITS: u8 = 8;
/// Number of zero bytes that are appended to the data, so that the last code can be looked up.
const PADDING: usize = 4;

type Bytes<'a> = Map<Chain<Cloned<Iter<'a, u8>>, RepeatN<u8>>, fn(u8) -> Result<u8, Infallible>>;

struct FaxReader<'a> {
    bits: ByteReader<Bytes<'a>>,
    // Bits of the data, and the number of bits that were read.
    total: usize,
    read: usize,
    width: u32,
}

/// Reason why a row ends early.
enum Stop {
    /// The data marks the end of all rows.
    End,
    /// A code is unknown or points beyond the end of the row, or the data ends.
    Broken,
}

impl BitReader for FaxReader<'_> {
    type Error = ();

    fn peek(&self, bits: u8) -> Option<u16> {
        self.bits.peek(bits)
    }

    fn consume(&mut self, bits: u8) -> Result<(), ()> {
        self.read += usize::from(bits);
        if self.read > self.total {
            return Err(());
        }
        self.bits.consume(bits).map_err(|never| match never {})
    }

    fn bits_to_byte_boundary(&self) -> u8 {
        self.bits.bits_to_byte_boundary()
    }
}

/// Decodes into `rows` of `width.div_ceil(8)` bytes each. The caller passes white rows (all bits
/// 0). Returns `None` if the data ends or breaks off before the last row. If the data marks its end
/// before the last row, the remaining rows stay white. A broken row of Group 3 is white from the
/// error on, and the next row begins at the next end-of-line code, as in libtiff.
pub(super) fn decode_fax(encoded: &[u8], coding: Coding, width: u32, rows: &mut [u8]) -> Option<()> {
    let ok: fn(u8) -> Result<u8, Infallible> = Ok;
    let bytes = encoded.iter().cloned().chain(repeat_n(0, PADDING)).map(ok);
    let Ok(bits) = ByteReader::new(bytes);
    let mut reader = FaxReader { bits, total: encoded.len() * 8, read: 0, width };
    let (mut above, mut changes) = (Vec::new(), Vec::new());
    for (number, row) in rows.chunks_exact_mut((width as usize).div_ceil(8)).enumerate() {
        changes.clear();
        let read = match coding {
            Coding::Runs => reader.row_of_runs(&mut changes).and_then(|()| reader.skip_to(8)),
            Coding::RunsByWord => reader.row_of_runs(&mut changes).and_then(|()| reader.skip_to(16)),
            Coding::Group3 { is_two_dimensional } => {
                reader.row_of_group_3(number, is_two_dimensional, &above, &mut changes)
            }
            Coding::Group4 => reader.row_by_row_above(&above, &mut changes),
        };
        match read {
            Ok(()) => {}
            Err(Stop::End) => return Some(()),
            Err(Stop::Broken) if matches!(coding, Coding::Group3 { .. }) => {
                reader.skip_to_end_of_line()?;
                changes.truncate(changes.len() / 2 * 2);
            }
            Err(Stop::Broken) => return None,
        }
        blacken(&changes, width, row);
        std::mem::swap(&mut above, &mut changes);
    }
    Some(())
}

/// Sets the bits of the black runs. `changes` alternates between the start and the end of a black
/// run.
fn blacken(changes: &[u32], width: u32, row: &mut [u8]) {
    for run in changes.chunks(2) {
        let end = run.get(1).copied().unwrap_or(width);
        set_bits(row, run[0], end - run[0]);
    }
}

fn set_bits(row: &mut [u8], start: u32, length: u32) {
    let (first, last) = (start as usize, (start + length) as usize);
    let (first_byte, last_byte) = (first / 8, last / 8);
    let (head, tail) = (0xff >> (first % 8), !(0xff_u16 >> (last % 8)) as u8);
    if first_byte == last_byte {
        if length > 0 {
            row[first_byte] |= head & tail;
        }
        return;
    }
    row[first_byte] |= head;
    row[first_byte + 1..last_byte].fill(0xff);
    if last % 8 > 0 {
        row[last_byte] |= tail;
    }
}

impl FaxReader<'_> {
    /// Length of a white or black run: any number of codes of 64 and more, then one code below 64.
    fn run(&mut self, is_black: bool) -> Result<u32, Stop> {
        let mut sum = 0;
        loop {
            let part = if is_black { black::decode(self) } else { white::decode(self) };
            let part = u32::from(part.ok_or(Stop::Broken)?);
            sum += part;
            if part < 64 {
                return Ok(sum);
            }
            if sum > self.width {
                return Err(Stop::Broken);
            }
        }
    }

    /// Reads a row of run lengths into `changes`, the positions where the color changes. A row
    /// begins white.
    fn row_of_runs(&mut self, changes: &mut Vec<u32>) -> Result<(), Stop> {
        let (mut at, mut is_black) = (0, false);
        while at < self.width {
            at += self.run(is_black)?;
            self.push(changes, at)?;
            is_black = !is_black;
        }
        Ok(())
    }

    fn push(&self, changes: &mut Vec<u32>, at: u32) -> Result<(), Stop> {
        // Runs of zero pixels are allowed, but only a limited number of them.
        if at > self.width || changes.len() > 2 * self.width as usize + 4 {
            return Err(Stop::Broken);
        }
        changes.push(at);
        Ok(())
    }

    /// Reads a row whose codes refer to the color changes of the row above (T.4, section 4.2; T.6,
    /// section 2.2).
    fn row_by_row_above(&mut self, above: &[u32], changes: &mut Vec<u32>) -> Result<(), Stop> {
        let (mut at, mut is_black, mut is_start, mut next) = (0, false, true, 0_usize);
        while at < self.width {
            // b1: the first change in the row above to the opposite color, to the right
            // of the current position.
            next = next.saturating_sub(2);
            while above.get(next).is_some_and(|&change| change < at || (change == at && !is_start))
                || (next < above.len() && (next % 2 == 1) != is_black)
            {
                next += 1;
            }
            let change_above = |index: usize| above.get(index).copied().unwrap_or(self.width);
            let (first, second) = (change_above(next), change_above(next + 1));
            match mode::decode(self).ok_or(Stop::Broken)? {
                Mode::Pass => at = second,
                Mode::Vertical(shift) => {
                    let place = first.checked_add_signed(shift.into()).filter(|place| *place >= at);
                    at = place.ok_or(Stop::Broken)?;
                    self.push(changes, at)?;
                    is_black = !is_black;
                }
                Mode::Horizontal => {
                    for is_black in [is_black, !is_black] {
                        at += self.run(is_black)?;
                        self.push(changes, at)?;
                    }
                }
                Mode::EOF => return Err(Stop::End),
                Mode::Extension => return Err(Stop::Broken),
            }
            is_start = false;
        }
        Ok(())
    }

    /// Reads a Group 3 row. End-of-line codes and fill bits may precede the row. Several
    /// end-of-line codes end the picture, except before the first row.
    fn row_of_group_3(
        &mut self,
        number: usize,
        is_two_dimensional: bool,
        above: &[u32],
        changes: &mut Vec<u32>,
    ) -> Result<(), Stop> {
        let mut follows_above = false;
        let mut codes = 0;
        while self.peek(FILL_BITS) == Some(0) {
            self.skip_to_end_of_line().ok_or(Stop::Broken)?;
            self.consume(12).map_err(|()| Stop::Broken)?;
            if is_two_dimensional {
                follows_above = self.peek(1) == Some(0);
                self.consume(1).map_err(|()| Stop::Broken)?;
            }
            codes += 1;
            if codes > 1 && number > 0 {
                return Err(Stop::End);
            }
        }
        if follows_above { self.row_by_row_above(above, changes) } else { self.row_of_runs(changes) }
    }

    /// Skips up to the next end-of-line code: 11 zeros and a 1. `None` if there is no such code.
    fn skip_to_end_of_line(&mut self) -> Option<()> {
        while self.peek(12)? != 1 {
            self.consume(1).ok()?;
        }
        Some(())
    }

    /// Skips to the next multiple of `unit` bits, or to the end of the data if that comes first.
    fn skip_to(&mut self, unit: usize) -> Result<(), Stop> {
        let bits = self.read.next_multiple_of(unit).min(self.total) - self.read;
        self.consume(bits as u8).map_err(|()| Stop::Broken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fax_runs_set_exactly_their_bits() {
        for (start, end) in [(0, 0), (0, 8), (3, 5), (3, 8), (3, 17), (8, 16), (0, 24), (23, 24), (24, 24)] {
            let mut row = [0; 3];
            set_bits(&mut row, start, end - start);
            let set: Vec<u32> = (0..24).filter(|bit| row[*bit as usize / 8] & (0x80 >> (bit % 8)) != 0).collect();
            assert_eq!(set, (start..end).collect::<Vec<_>>(), "{start}..{end}");
        }
    }

    #[test]
    fn hostile_fax_data_is_decoded_in_bounded_time() {
        for coding in [Coding::Runs, Coding::RunsByWord, Coding::Group4, Coding::Group3 { is_two_dimensional: true }] {
            for byte in 0..=255 {
                let mut rows = vec![0; 7 * 100];
                let _ = decode_fax(&[byte; 500], coding, 50, &mut rows);
                let _ = decode_fax(&[byte, 255 - byte, byte.rotate_left(3)].repeat(200), coding, 50, &mut rows);
            }
            assert_eq!(decode_fax(&[], coding, 50, &mut [0; 7]), None);
        }
    }
}
