//! Increases and rates of counters between two scrapes.

use super::samples::{Labels, Samples};

/// An earlier scrape, and its age.
#[derive(Clone, Copy, Debug)]
pub struct Since<'a> {
    pub before: &'a Samples,
    /// Seconds from that scrape until now. Above 0.
    pub seconds: f64,
}

impl Since<'_> {
    /// Returns the increase of a counter. As in Prometheus, a counter that fell has restarted from
    /// 0, so its value is the increase. A counter that was absent before counts from zero. `None`
    /// if the counter is absent now.
    pub fn increase(&self, now: &Samples, name: &str, labels: Labels<'_>) -> Option<f64> {
        let now = now.value(name, labels)?;
        let before = self.before.value(name, labels).unwrap_or(0.0);
        Some(if now < before { now } else { now - before })
    }

    /// Returns the increase per second.
    pub fn per_second(&self, now: &Samples, name: &str, labels: Labels<'_>) -> Option<f64> {
        Some(self.increase(now, name, labels)? / self.seconds).filter(|rate| rate.is_finite())
    }
}

#[cfg(test)]
mod tests {
    use super::{super::exposition::read, *};

    #[test]
    fn decreased_counters_count_as_restarted_and_new_counters_from_zero() {
        let before = read("a_total{m=\"x\"} 10\na_total{m=\"y\"} 10\n", "").expect("the text is well-formed");
        let now = read("a_total{m=\"x\"} 16\na_total{m=\"y\"} 4\nb_total 3\n", "").expect("the text is well-formed");
        let since = Since { before: &before, seconds: 2.0 };
        assert_eq!(since.per_second(&now, "a_total", &[("m", "x")]), Some(3.0));
        assert_eq!(since.increase(&now, "a_total", &[("m", "y")]), Some(4.0));
        assert_eq!(since.increase(&now, "b_total", &[]), Some(3.0));
        assert_eq!(since.increase(&now, "c_total", &[]), None);
        assert_eq!(Since { before: &before, seconds: 0.0 }.per_second(&now, "a_total", &[("m", "x")]), None);
    }
}
