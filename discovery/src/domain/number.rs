//! Checked conversions of numbers into a row's types.

/// A number that is too large for a row. If it were stored, it would be read back as another
/// number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} is more than a row can hold")]
pub(crate) struct OutOfRange(pub u64);

/// Converts an epoch, counter or time to the signed 64-bit integer of a row.
pub(crate) fn number_to_row(number: u64) -> Result<i64, OutOfRange> {
    i64::try_from(number).map_err(|_| OutOfRange(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_does_not_fit_a_row_is_an_error() {
        assert_eq!(number_to_row(i64::MAX as u64), Ok(i64::MAX));
        assert_eq!(number_to_row(1 << 63), Err(OutOfRange(1 << 63)));
    }
}
