//! Pure: forecast of a start from a plan, with its sizes, the memory that it lacks, and the changes
//! that would help.

mod advice;
mod forecast;
mod min_ranks;
mod question;
mod search;
mod suggestion;
mod unfit;

pub(crate) use advice::advice;
pub use forecast::Forecast;
pub use min_ranks::{MinRanks, PlacementQuery};
pub use question::Question;
pub use suggestion::{Change, Suggestion, TOTAL};
pub use unfit::{NoRanksFit, RanksShortfall, RanksTried, Shortfall, Unfit};
