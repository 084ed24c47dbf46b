//! Whether a sender copies the short messages whose receives this side has posted ahead.
//!
//! A receiver that computes after it has posted a receive leaves the copy to the sender, which most
//! likely waits. But it may compute too, or the receiver may wait at once, as a call that receives
//! and waits does: then the receiver copies, and has told the sender of its target for nothing. So
//! each connection remembers who copied the last of these messages.

/// Who copied the last messages of one peer.
#[derive(Debug)]
pub(super) struct SenderHelp {
    /// Grows with each message that the sender copied, and falls with each that it did not.
    score: u8,
    /// The messages since help was last expected, while the score is 0.
    unasked: u8,
}

impl SenderHelp {
    const FIRST_SCORE: u8 = 4;
    const MAX_SCORE: u8 = 16;
    /// Of a sender that does not help, one message in so many is left to it again.
    const ASK_ONE_IN: u8 = 64;

    pub(super) fn new() -> Self {
        Self { score: Self::FIRST_SCORE, unasked: 0 }
    }

    /// Whether the sender is likely to copy the next message.
    pub(super) fn is_expected(&mut self) -> bool {
        if self.score > 0 {
            return true;
        }
        self.unasked = (self.unasked + 1) % Self::ASK_ONE_IN;
        self.unasked == 0
    }

    /// Records who copied a message that was left to the sender.
    pub(super) fn record(&mut self, by_sender: bool) {
        self.score = if by_sender {
            (self.score + 2).min(Self::MAX_SCORE)
        } else {
            self.score.saturating_sub(1)
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sender_that_never_helps_is_rarely_asked_and_one_that_helps_again_is_asked_always() {
        let mut help = SenderHelp::new();
        let asked = |help: &mut SenderHelp, helps: bool| {
            let asked = (0..640).filter(|_| {
                let is_expected = help.is_expected();
                if is_expected {
                    help.record(helps);
                }
                is_expected
            });
            asked.count()
        };
        assert_eq!(asked(&mut help, false), 4 + 9);
        assert!(asked(&mut help, true) > 570);
        assert_eq!(asked(&mut help, true), 640);
        // Now and then the sender has something else to do.
        (0..15).for_each(|_| help.record(false));
        assert!(help.is_expected());
    }
}
