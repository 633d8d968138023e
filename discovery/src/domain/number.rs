//! Numbers on their way into a row.

/// A number that no row can hold: it would come back as another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} is more than a row can hold")]
pub(crate) struct OutOfRange(pub u64);

/// Epochs, counters and times in rows, which are signed there.
pub(crate) fn epoch_to_row(number: u64) -> Result<i64, OutOfRange> {
    i64::try_from(number).map_err(|_| OutOfRange(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_would_come_back_as_another_is_an_error() {
        assert_eq!(epoch_to_row(i64::MAX as u64), Ok(i64::MAX));
        assert_eq!(epoch_to_row(1 << 63), Err(OutOfRange(1 << 63)));
    }
}
