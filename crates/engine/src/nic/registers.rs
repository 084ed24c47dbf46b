//! The registers and descriptors of the 82574L and its relatives that a card in loopback needs.
//! From Intel's datasheet of that controller.

/// Device control.
pub const CTRL: usize = 0x0000;
/// Device status.
pub const STATUS: usize = 0x0008;
/// Interrupt mask clear.
pub const IMC: usize = 0x00D8;
/// Pending interrupts; reading clears them.
pub const ICR: usize = 0x00C0;
/// Extended device control.
pub const CTRL_EXT: usize = 0x0018;
/// Interrupt mask set: the interrupts that are raised.
pub const IMS: usize = 0x00D0;
/// The interrupts that clear their cause when their MSI-X vector is raised.
pub const EIAC: usize = 0x00DC;
/// The MSI-X vectors of the causes.
pub const IVAR: usize = 0x00E4;
/// Receive control.
pub const RCTL: usize = 0x0100;
/// Transmit control.
pub const TCTL: usize = 0x0400;
/// Gaps between frames.
pub const TIPG: usize = 0x0410;
/// Packet split: sizes of the buffers of a receive descriptor.
pub const PSRCTL: usize = 0x2170;
/// Receive ring: address (low half).
pub const RDBAL: usize = 0x2800;
/// Receive ring: address (high half).
pub const RDBAH: usize = 0x2804;
/// Receive ring: bytes.
pub const RDLEN: usize = 0x2808;
/// Receive ring: the next descriptor of the card, in units of 16 bytes.
pub const RDH: usize = 0x2810;
/// Receive ring: the first descriptor that the card must not use, in units of 16 bytes.
pub const RDT: usize = 0x2818;
/// Transmit ring: address (low half).
pub const TDBAL: usize = 0x3800;
/// Transmit ring: address (high half).
pub const TDBAH: usize = 0x3804;
/// Transmit ring: bytes.
pub const TDLEN: usize = 0x3808;
/// Transmit ring: the next descriptor of the card.
pub const TDH: usize = 0x3810;
/// Transmit ring: the first descriptor that the card must not use.
pub const TDT: usize = 0x3818;
/// Transmit descriptors: thresholds of fetch and write-back.
pub const TXDCTL: usize = 0x3828;
/// Receive checksums.
pub const RXCSUM: usize = 0x5000;
/// Receive filters and the format of descriptors.
pub const RFCTL: usize = 0x5008;

/// `CTRL`: full duplex.
pub const CTRL_FULL_DUPLEX: u32 = 1 << 0;
/// `CTRL`: the card starts no new bus requests.
pub const CTRL_STOP_BUS: u32 = 1 << 2;
/// `CTRL`: the link is up.
pub const CTRL_LINK_UP: u32 = 1 << 6;
/// `CTRL`: 1000 Mb/s.
pub const CTRL_SPEED_1000: u32 = 2 << 8;
/// `CTRL`: speed and duplex are forced to these bits.
pub const CTRL_FORCE: u32 = 1 << 11 | 1 << 12;
/// `CTRL`: reset. Clears itself.
pub const CTRL_RESET: u32 = 1 << 26;

/// `STATUS`: the card has bus requests in flight.
pub const STATUS_ON_BUS: u32 = 1 << 19;

/// `RCTL`: receiver enable.
pub const RCTL_ENABLE: u32 = 1 << 1;
/// `RCTL`: accepts frames for all addresses.
pub const RCTL_PROMISCUOUS: u32 = 1 << 3 | 1 << 4 | 1 << 15;
/// `RCTL`: accepts frames of more than 1522 bytes.
pub const RCTL_LONG_FRAMES: u32 = 1 << 5;
/// `RCTL`: loopback.
pub const RCTL_LOOPBACK: u32 = 1 << 6;
/// `RCTL`: descriptors with several buffers.
pub const RCTL_PACKET_SPLIT: u32 = 1 << 10;
/// `RCTL`: the card does not write the checksum of a frame to memory.
pub const RCTL_STRIP_CHECKSUM: u32 = 1 << 26;

/// `TCTL`: transmitter enable.
pub const TCTL_ENABLE: u32 = 1 << 1;
/// `TCTL`: pads short frames.
pub const TCTL_PAD: u32 = 1 << 3;
/// `TCTL`: the datasheet's values for full duplex.
pub const TCTL_COLLISIONS: u32 = 0x0F << 4 | 0x3F << 12;

/// `TIPG`: the datasheet's values.
pub const TIPG_USUAL: u32 = 8 | 8 << 10 | 6 << 20;

/// `TXDCTL`: thresholds count descriptors, as the datasheet requires.
pub const TXDCTL_COUNT_DESCRIPTORS: u32 = 1 << 22;

/// `RFCTL`: extended descriptors, which packet split requires.
pub const RFCTL_EXTENDED: u32 = 1 << 15;

/// `CTRL_EXT`: a raised vector masks its interrupts again, those of `EIAC`.
pub const CTRL_EXT_AUTO_MASK: u32 = 1 << 24;
/// `CTRL_EXT`: reading the cause masks interrupts, which MSI-X must not.
pub const CTRL_EXT_MASK_BY_READ: u32 = 1 << 27;
/// `CTRL_EXT`: the pending bits of MSI-X are cleared as PCI requires.
pub const CTRL_EXT_MSIX_PENDING: u32 = 1 << 31;

/// `IMS`, `EIAC`: a descriptor of the transmit queue was written back.
pub const INTERRUPT_TRANSMITTED: u32 = 1 << 22;
/// `IVAR`: the transmit queue raises vector 0.
pub const IVAR_TRANSMIT_VECTOR_0: u32 = 1 << 11;

/// The value of every register of a removed card.
pub const GONE: u32 = u32::MAX;

/// A transmit descriptor.
pub mod transmit {
    /// The size in bytes.
    pub const BYTES: usize = 16;
    /// The last descriptor of a frame.
    pub const END: u64 = 1 << 24;
    /// The card adds the checksum of the frame.
    pub const CHECKSUM: u64 = 1 << 25;
    /// The card writes the descriptor back when it is sent, which raises an interrupt.
    pub const REPORT: u64 = 1 << 27;

    /// The two words of a descriptor.
    pub fn words(address: u64, bytes: u16, flags: u64) -> [u64; 2] {
        [address, u64::from(bytes) | flags]
    }
}

/// A receive descriptor with several buffers. It contains their addresses until a frame has
/// arrived, and then its status.
pub mod receive {
    /// The size in bytes.
    pub const BYTES: usize = 32;
    /// The offset of the status, which overwrites the lower half of the second address: an even
    /// address does not read as a received frame.
    pub const STATUS_AT: usize = 8;
    /// Status: a frame has arrived.
    pub const DONE: u32 = 1 << 0;
    /// Status: the frame ends here.
    pub const END: u32 = 1 << 1;
    /// Status: the errors of the frame.
    pub const ERRORS: u32 = 0x9F << 24;
    /// The offset of the word with the length in the first buffer, in bits 32 to 47.
    pub const FIRST_LENGTH_AT: usize = 8;
    /// The offset of the word with the lengths in the other buffers, from bit 16 on.
    pub const OTHER_LENGTHS_AT: usize = 16;
}
