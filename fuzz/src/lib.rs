//! What every target has: no single allocation out of proportion to what it is given.
//!
//! An input has at most some kilobytes (libFuzzer's `-max_len`), so that whatever asks for much more at
//! once believed a number in it.

use std::alloc::{GlobalAlloc, Layout, System};

/// The largest allocation that is in proportion.
const MAX_BYTES: usize = 16 << 20;

/// The system's allocator, which ends the process where too much is asked for.
struct Bounded;

#[global_allocator]
static BOUNDED: Bounded = Bounded;

fn check(bytes: usize) {
    if bytes > MAX_BYTES {
        // No panic: that allocates, and a decoder might catch it.
        std::process::abort();
    }
}

// SAFETY: each call goes to the system's allocator as it came.
unsafe impl GlobalAlloc for Bounded {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        check(layout.size());
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        check(layout.size());
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        check(bytes);
        unsafe { System.realloc(memory, layout, bytes) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        unsafe { System.dealloc(memory, layout) }
    }
}
