//! Pure: forecast of a start from a plan: the sizes, the missing memory, and the changes that would
//! make the model fit.

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
