//! `strftime_now`: date formatting for templates. The time is an input, so that a prompt can be
//! rendered again with the same result.

use std::fmt::Write;

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

struct Moment {
    year: i64,
    month: usize,   // 0 is January
    day: i64,       // from 1
    year_day: i64,  // from 1
    weekday: usize, // 0 is Sunday
    hour: i64,
    minute: i64,
    second: i64,
}

/// Formats seconds since 1970, shifted to the user's time zone, like C's `strftime` in the C
/// locale. All other codes, including some of C's such as `%c`, are copied unchanged, as glibc does
/// with unknown codes.
pub(crate) fn strftime(format: &str, unix_seconds: i64) -> String {
    let moment = Moment::new(unix_seconds);
    let mut text = String::new();
    let mut chars = format.chars();
    while let Some(char) = chars.next() {
        if char != '%' {
            text.push(char);
            continue;
        }
        match chars.next() {
            Some('-') => {
                let Some(code) = chars.next() else {
                    text.push_str("%-");
                    break;
                };
                let mut padded = String::new();
                moment.write(&mut padded, code);
                let bare = padded.trim_start_matches(['0', ' ']);
                text.push_str(if bare.is_empty() { "0" } else { bare });
            }
            Some(code) => moment.write(&mut text, code),
            None => text.push('%'),
        }
    }
    text
}

impl Moment {
    /// Converts days to a date with Howard Hinnant's `civil_from_days`
    /// (howardhinnant.github.io/date_algorithms.html).
    fn new(unix_seconds: i64) -> Self {
        let (days, seconds) = (unix_seconds.div_euclid(86_400), unix_seconds.rem_euclid(86_400));
        let shifted = days + 719_468; // days since 0000-03-01
        let era = shifted.div_euclid(146_097);
        let era_day = shifted.rem_euclid(146_097);
        let era_year = (era_day - era_day / 1_460 + era_day / 36_524 - era_day / 146_096) / 365;
        let march_day = era_day - (365 * era_year + era_year / 4 - era_year / 100);
        let march_month = (5 * march_day + 2) / 153;
        let month = if march_month < 10 { march_month + 2 } else { march_month - 10 };
        let year = era_year + era * 400 + i64::from(month < 2);
        let leap = (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
        let year_day = if month < 2 { march_day - 306 } else { march_day + 59 + i64::from(leap) };
        Moment {
            year,
            month: month as usize,
            day: march_day - (153 * march_month + 2) / 5 + 1,
            year_day: year_day + 1,
            weekday: (days + 4).rem_euclid(7) as usize,
            hour: seconds / 3_600,
            minute: seconds / 60 % 60,
            second: seconds % 60,
        }
    }

    fn write(&self, text: &mut String, code: char) {
        let (month, weekday) = (MONTHS[self.month], WEEKDAYS[self.weekday]);
        let twelve = (self.hour + 11) % 12 + 1;
        // Writing to a String cannot fail.
        let _ = match code {
            'Y' => write!(text, "{}", self.year),
            'y' => write!(text, "{:02}", self.year.rem_euclid(100)),
            'm' => write!(text, "{:02}", self.month + 1),
            'B' => write!(text, "{month}"),
            'b' | 'h' => write!(text, "{}", &month[..3]),
            'd' => write!(text, "{:02}", self.day),
            'e' => write!(text, "{:2}", self.day),
            'j' => write!(text, "{:03}", self.year_day),
            'A' => write!(text, "{weekday}"),
            'a' => write!(text, "{}", &weekday[..3]),
            'u' => write!(text, "{}", (self.weekday + 6) % 7 + 1),
            'w' => write!(text, "{}", self.weekday),
            'H' => write!(text, "{:02}", self.hour),
            'I' => write!(text, "{twelve:02}"),
            'M' => write!(text, "{:02}", self.minute),
            'S' => write!(text, "{:02}", self.second),
            'p' => write!(text, "{}", if self.hour < 12 { "AM" } else { "PM" }),
            'F' => write!(text, "{}-{:02}-{:02}", self.year, self.month + 1, self.day),
            'T' => write!(text, "{:02}:{:02}:{:02}", self.hour, self.minute, self.second),
            'R' => write!(text, "{:02}:{:02}", self.hour, self.minute),
            'D' => write!(text, "{:02}/{:02}/{:02}", self.month + 1, self.day, self.year.rem_euclid(100)),
            'n' => writeln!(text),
            't' => write!(text, "\t"),
            '%' => write!(text, "%"),
            other => write!(text, "%{other}"),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_formatted_as_in_python() {
        // The expected texts are the output of
        // `datetime.fromtimestamp(s, timezone.utc).strftime(f)` in CPython 3.11.
        let format = "%d %b %Y, %A %B %-d %j %H:%M:%S %I %p %y";
        let expected = [
            (0, "01 Jan 1970, Thursday January 1 001 00:00:00 12 AM 70"),
            (951_782_400, "29 Feb 2000, Tuesday February 29 060 00:00:00 12 AM 00"),
            (1_735_689_599, "31 Dec 2024, Tuesday December 31 366 23:59:59 11 PM 24"),
            (1_767_182_400, "31 Dec 2025, Wednesday December 31 365 12:00:00 12 PM 25"),
            (-1, "31 Dec 1969, Wednesday December 31 365 23:59:59 11 PM 69"),
        ];
        for (seconds, text) in expected {
            assert_eq!(text, strftime(format, seconds));
        }
        assert_eq!("100% %q %", strftime("100%% %q %", 0));
    }
}
