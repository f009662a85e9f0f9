//! Pure: sums of the leases of each model and class, with their peaks.

use std::collections::{BTreeMap, BTreeSet};

use bursar_budgets::{Bytes, Class, Holding, Label};

/// The model and class by which leases are summed. All leases of a user's own code share one line,
/// because users choose the names of these classes.
pub(super) type Line = (Label, Class);

#[derive(Debug, Default)]
pub(super) struct LeaseSums(BTreeMap<Line, Sum>);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sum {
    pub(super) bytes: Bytes,
    pub(super) peak: Bytes,
}

pub(super) fn line(model: &Label, class: &Class) -> Line {
    match class {
        Class::External(_) => (Label::from(""), Class::external("")),
        class => (model.clone(), class.clone()),
    }
}

impl LeaseSums {
    /// Recomputes the sums from the live leases. Lines without leases are kept, with a sum of 0.
    pub(super) fn recount(&mut self, held: impl Iterator<Item = Holding>) {
        self.0.values_mut().for_each(|sum| sum.bytes = Bytes::ZERO);
        for Holding { model, class, bytes, .. } in held {
            self.change(line(&model, &class), Bytes::ZERO, bytes);
        }
    }

    /// Updates the sum of this line for a lease that changed from `from` bytes to `to`. Returns the
    /// new sum.
    pub(super) fn change(&mut self, line: Line, from: Bytes, to: Bytes) -> Sum {
        let sum = self.0.entry(line).or_default();
        sum.bytes = sum.bytes + to - from;
        sum.peak = sum.peak.max(sum.bytes);
        *sum
    }

    /// Returns all lines of models that hold any memory. Lines with a sum of 0 are included,
    /// because their peaks matter until the model is unloaded.
    pub(super) fn live_lines(&self) -> impl Iterator<Item = (&Line, Sum)> {
        let live: BTreeSet<&Label> =
            self.0.iter().filter(|(_, sum)| !sum.bytes.is_zero()).map(|((model, _), _)| model).collect();
        self.lines().filter(move |((model, _), _)| live.contains(model))
    }

    /// Returns every line that ever had a lease.
    pub(super) fn lines(&self) -> impl Iterator<Item = (&Line, Sum)> {
        self.0.iter().map(|(line, sum)| (line, *sum))
    }
}

#[cfg(test)]
mod tests {
    use bursar_budgets::{LeaseId, Owner, Priority};

    use super::*;

    fn holding(class: Class, model: &str, mib: u64) -> Holding {
        let owner = Owner::new("engine", 0);
        Holding {
            id: LeaseId(1),
            owner,
            class,
            model: model.into(),
            bytes: Bytes::mib(mib),
            priority: Priority::Serving,
        }
    }

    #[test]
    fn a_line_sums_its_leases_and_keeps_their_peak() {
        let mut sums = LeaseSums::default();
        let kv = line(&"demo".into(), &Class::Kv);
        let mut changes = |from, to| {
            let Sum { bytes, peak } = sums.change(kv.clone(), Bytes::mib(from), Bytes::mib(to));
            (bytes, peak)
        };
        assert_eq!(changes(0, 3), (Bytes::mib(3), Bytes::mib(3)));
        assert_eq!(changes(0, 2), (Bytes::mib(5), Bytes::mib(5)), "two leases of one line are added");
        assert_eq!(changes(3, 2), (Bytes::mib(4), Bytes::mib(5)), "the first lease shrank");
        assert_eq!(
            changes(2, 3),
            (Bytes::mib(5), Bytes::mib(5)),
            "bytes held at different times are not counted twice"
        );
        sums.change(line(&"demo".into(), &Class::Weights), Bytes::ZERO, Bytes::mib(7));
        sums.recount([holding(Class::Weights, "demo", 7), holding(Class::Weights, "demo", 1)].into_iter());
        let lines: Vec<_> = sums.lines().map(|((_, class), sum)| (class.clone(), sum.bytes, sum.peak)).collect();
        let weights = (Class::Weights, Bytes::mib(8), Bytes::mib(8));
        assert_eq!(lines, [weights, (Class::Kv, Bytes::ZERO, Bytes::mib(5))]);
        assert_eq!(sums.live_lines().count(), 2, "the model holds its weights");
        sums.recount(std::iter::empty());
        assert_eq!(
            (sums.live_lines().count(), sums.lines().count()),
            (0, 2),
            "the model is gone, but its lines keep their peaks"
        );
    }

    #[test]
    fn tenants_share_one_line_whatever_their_names() {
        let mut sums = LeaseSums::default();
        for number in 0..100 {
            let model = Label::from(format!("model {number}"));
            sums.change(line(&model, &Class::external(format!("index {number}"))), Bytes::ZERO, Bytes::mib(1));
        }
        let lines: Vec<_> = sums.lines().map(|(line, sum)| (line.clone(), sum.bytes)).collect();
        assert_eq!(lines, [(("".into(), Class::external("")), Bytes::mib(100))]);
    }
}
