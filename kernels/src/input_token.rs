//! Input tokens of a step.

/// The bit of a token's code that marks a token whose id the host has not seen. The other bits are
/// then a row of the previous step's choices, from which the device reads the id. Therefore a
/// vocabulary has fewer than 2^31 tokens.
pub(crate) const PREVIOUS: u32 = 1 << 31;

/// A token that the previous step chooses, or has chosen, and whose id the host has not seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct UnseenToken {
    /// The row of the previous step's choices that contains the id, below 2^31.
    pub row: u32,
}

/// An input token of a step.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub enum InputToken {
    /// A token id, below 2^31.
    Known(u32),
    /// A token whose id only the device knows.
    Unseen(UnseenToken),
}

impl UnseenToken {
    /// Returns the code that the device code reads.
    pub const fn code(self) -> u32 {
        assert!(self.row < PREVIOUS, "the row index is below the code for a previous token");
        PREVIOUS | self.row
    }
}

impl InputToken {
    /// Returns the code that the device code reads: the id, or a row with the highest bit set.
    pub const fn code(self) -> u32 {
        match self {
            InputToken::Known(id) => {
                assert!(id < PREVIOUS, "the token id is below the code for a previous token");
                id
            }
            InputToken::Unseen(unseen) => unseen.code(),
        }
    }

    pub const fn of_code(code: u32) -> Self {
        match code & PREVIOUS {
            0 => InputToken::Known(code),
            _ => InputToken::Unseen(UnseenToken { row: code & !PREVIOUS }),
        }
    }

    /// Returns the id of a known token. For an unseen token, returns its entry in `chosen`, the
    /// previous step's choices, or `None` if `chosen` does not have this row.
    pub fn id(self, chosen: &[u32]) -> Option<u32> {
        match self {
            InputToken::Known(id) => Some(id),
            InputToken::Unseen(UnseenToken { row }) => chosen.get(row as usize).copied(),
        }
    }
}

/// Shows rows but never ids, because ids are the user's text.
impl std::fmt::Debug for InputToken {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            InputToken::Known(_) => formatter.write_str("Known"),
            InputToken::Unseen(unseen) => write!(formatter, "{unseen:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_code_is_an_id_or_a_row() {
        for token in [0, 7, PREVIOUS - 1].map(InputToken::Known) {
            assert_eq!(InputToken::of_code(token.code()), token);
        }
        for row in [0, 7, PREVIOUS - 1] {
            let token = InputToken::Unseen(UnseenToken { row });
            assert_eq!(InputToken::of_code(token.code()), token);
        }
        assert_eq!(InputToken::Known(7).code(), 7);
        assert_eq!(UnseenToken { row: 7 }.code(), 0x8000_0007);
    }

    #[test]
    fn an_unseen_token_has_the_id_chosen_in_its_row() {
        let unseen = |row| InputToken::Unseen(UnseenToken { row });
        assert_eq!(
            [InputToken::Known(1), unseen(1), unseen(2)].map(|token| token.id(&[5, 6])),
            [Some(1), Some(6), None]
        );
    }
}
